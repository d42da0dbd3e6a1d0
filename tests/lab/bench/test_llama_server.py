"""llama-server is started with the right arguments, its answers are read, and it is always stopped.

No package index has it, so a stand-in plays it here: a real process with the same endpoints and the
same ways to fail.
"""

from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local.errors import BackendError, InputError
from lab.bench import llama_server
from lab.bench.llama_server import LlamaServer
from lab.replay.recorded import RecordedDrafts
from llama_server_stand_in import alive, program, requests, runs

TARGET, DRAFT = Path("target.gguf"), Path("draft.gguf")
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_gpu_layers": -1, "n_threads": 1}


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda mode: monkeypatch.setenv("STAND_IN", mode)


def server(folder: Path, draft: Path | None = DRAFT, **options: Any) -> LlamaServer:
    return LlamaServer(program(folder), TARGET, draft, **{**OPTIONS, **options})


def option(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1
    return arguments[arguments.index(name) + 1]


def test_requests_say_what_was_asked_and_answers_have_the_servers_own_times(tmp_path: Path) -> None:
    options = {"temperature": 0.7, "seed": 9, "ignore_eos": True}
    with server(tmp_path, n_gpu_layers=0) as running:
        answer = running.complete((5, 6), max_tokens=11, **options)
        running.complete([1], max_tokens=1)
    assert (answer.n_tokens, answer.n_accepted, answer.rounds) == (11, 5, 5)
    assert (answer.tokens_per_second, answer.ttft_s) == (20.0, 0.25)
    asked, greedy = requests(tmp_path)
    assert asked == {"prompt": [5, 6], "n_predict": 11, "cache_prompt": False, **options}
    assert (greedy["temperature"], greedy["ignore_eos"]) == (0.0, False)
    assert "seed" not in greedy
    (arguments,) = runs(tmp_path)
    assert (option(arguments, "-ngl"), option(arguments, "--device")) == ("0", "none")


def test_arguments_are_those_of_the_run(tmp_path: Path) -> None:
    chances = RecordedDrafts.shipped().rates(6.5, 7)
    options: dict[str, Any] = {"n_ctx": 4096, "n_slots": 4, "n_threads": 3, "kv_type": "q8_0"}
    options |= {"n_draft_max": 7, "drafts_by": "draft-dflash", "synthetic_rates": chances}
    with server(tmp_path, **options, overrides={"^blk\\.0\\.": "CPU", "exps": "CPU"}):
        pass
    (arguments,) = runs(tmp_path)
    for name, value in {
        **{"-m": "target.gguf", "-md": "draft.gguf", "-c": "16384", "-np": "4", "-t": "3"},
        **{"--spec-type": "draft-dflash", "--spec-draft-n-max": "7", "-fa": "on"},
        **{"-ngl": "all", "--spec-draft-ngl": "all", "-ctk": "q8_0", "-ctv": "q8_0"},
        **{"-ot": "^blk\\.0\\.=CPU,exps=CPU"},
    }.items():
        assert option(arguments, name) == value
    said = option(arguments, "--spec-synth-rates")
    assert [float(rate) for rate in said.split(",")] == chances


def test_plain_decoding_has_no_drafter_and_names_no_device(tmp_path: Path) -> None:
    with server(tmp_path, None, flash_attn=False) as running:
        answer = running.complete([5], max_tokens=4)
    assert (answer.n_accepted, answer.rounds) == (0, 3)
    (arguments,) = runs(tmp_path)
    assert option(arguments, "-fa") == "off"
    assert not {"-md", "--device"} & set(arguments)
    assert not [argument for argument in arguments if argument.startswith("--spec")]


def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path: Path, behave: Any) -> None:
    behave("taken")
    with server(tmp_path) as running:
        running.complete([1], max_tokens=1)
    first, second = runs(tmp_path)
    assert option(first, "--port") != option(second, "--port")


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(logs))
    with pytest.raises(RuntimeError), server(tmp_path):
        assert alive(tmp_path)
        raise RuntimeError
    assert not alive(tmp_path)
    assert list(logs.iterdir()) == []


def test_a_server_that_does_not_stop_is_killed(
    tmp_path: Path, behave: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("stubborn")
    monkeypatch.setattr(llama_server, "_STOP_S", 0.2)
    with server(tmp_path):
        pass
    assert not alive(tmp_path)


def test_a_server_that_never_comes_up_is_given_up_and_stopped(
    tmp_path: Path, behave: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("deaf")
    monkeypatch.setattr(llama_server, "_START_S", 0.6)

    def clock() -> float:
        return 1.0 if (tmp_path / "said").exists() else 0.0  # the time is over when it has spoken

    monkeypatch.setattr(llama_server, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    with pytest.raises(BackendError, match=r"not ready after 1 s: .*never comes"), server(tmp_path):
        pass
    assert not alive(tmp_path)


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("dies", "llama-server ended with code 3: common_init_: failed to load model 'x.gguf'$"),
        ("silent death", "ended with code 4: it said nothing$"),
        ("refuses", r"answered 400: request \(30 tokens\) exceeds"),
        ("another program", "answered without"),
        ("no json", "answered 200"),
        ("dies in a request", r"ended with code 134: GGML_ASSERT\(ctx != nullptr\)"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(
    mode: str, told: str, tmp_path: Path, behave: Any
) -> None:
    behave(mode)
    with pytest.raises(BackendError, match=told) as caught, server(tmp_path) as running:
        running.complete([1], max_tokens=1)
    assert "\n" not in str(caught.value)
    assert not alive(tmp_path)


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "broken").chmod(0o755)
    with (
        pytest.raises(InputError, match="cannot be run"),
        LlamaServer(tmp_path / "broken", TARGET, None, **OPTIONS),
    ):
        pass
