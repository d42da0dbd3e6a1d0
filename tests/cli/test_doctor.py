"""`dflash-local doctor`: the verdict on a pair that works, and on some that do not."""

import getpass
import json
import platform
from pathlib import Path

import pytest

import gguf_files
import tiny_coder
from chat_models import with_template
from command_line import run_here
from dflash_local.doctor import trial
from hybrid import write_hybrid
from small_model import write_small


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "N_TOKENS", 16)


def test_the_shipped_pair_is_well() -> None:
    done = run_here("doctor")
    assert done.returncode == 0, done.stdout
    head, empty, *facts = done.stdout.splitlines()
    assert "tokens per round" in head and empty == ""
    assert "drafting is" not in done.stderr + "".join(facts), "one verdict, in the first line"
    assert any(line.startswith("plan") and "tokens" in line for line in facts)
    check_private(done.stdout)


@pytest.mark.slow
def test_a_small_model_and_heads_are_told_apart(tmp_path: Path) -> None:
    target = tiny_coder.pair()[0]
    small = write_small(tmp_path / "small.gguf")
    with_head = write_hybrid(tmp_path / "head.gguf", "qwen35", target, head=0.0)
    for model, draft, told in (
        (target, str(small), "small.gguf, "),
        (with_head, "mtp", "the target's own heads\n"),
        (target, "copies", None),
    ):
        done = run_here("doctor", "--target", str(model), "--draft", draft, "-q")
        assert done.returncode == 0, done.stdout
        assert f"\ndrafter           {told}" in done.stdout or told is None
        assert told or "\ndrafter " not in done.stdout


@pytest.mark.slow
def test_json_tells_the_same() -> None:
    done = run_here("doctor", "--json", "-q")
    told = json.loads(done.stdout)
    assert told["is_well"] and told["alarms"] == []
    assert told["trial"]["tokens_per_round"] > 2 and told["trial"]["plain_speed"] > 0
    check_private(done.stdout)


def check_private(text: str) -> None:
    """It names neither the user nor the host, nor a folder."""
    private = [str(Path.home()), str(tiny_coder.pair()[0].parent), platform.node()]
    assert not [name for name in private if len(name) > 3 and name in text]
    assert getpass.getuser() == "root" or getpass.getuser() not in text


@pytest.mark.slow
def test_a_drafter_that_drafts_nonsense(tmp_path: Path) -> None:
    def shuffle(tensors: dict[str, gguf_files.Tensor]) -> None:
        data, kind = tensors["fc.weight"]
        tensors["fc.weight"] = data[::-1].copy(), kind

    target, drafter = tiny_coder.pair()
    broken = gguf_files.changed(drafter, tmp_path / "broken.gguf", tensors=shuffle)
    done = run_here("doctor", "--target", str(target), "--draft", str(broken), "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and not told["is_well"]
    assert told["alarms"][0]["name"] == "few_accepted"
    assert told["verdict"] == told["alarms"][0]["text"]


@pytest.mark.slow
def test_a_template_of_another_family_is_seen(tmp_path: Path) -> None:
    target = with_template(tiny_coder.pair()[0], tmp_path / "harmony.gguf", "harmony")
    asked = ("--target", str(target), "--draft", str(tiny_coder.pair()[1]), "--json")
    told = json.loads(run_here("doctor", *asked).stdout)
    assert "<|start|>" in told["trial"]["unknown_marks"]


def test_a_target_alone_is_told_so() -> None:
    done = run_here("doctor", str(tiny_coder.pair()[0]))
    assert done.stderr.count("without a drafter") == 1
    assert done.returncode == 0 and "--draft" in done.stdout.splitlines()[0]


def test_damaged_weights_are_found_without_a_drafter(tmp_path: Path) -> None:
    target = tiny_coder.pair()[0]
    broken = gguf_files.changed(target, tmp_path / "broken.gguf", tensors=gguf_files.spoil)
    done = run_here("doctor", "--json", str(broken))
    told = json.loads(done.stdout)
    assert done.returncode == 1 and "finite" in told["verdict"]
    assert "--no-flash-attn" in run_here("doctor", str(broken)).stdout.splitlines()[0]


def test_files_that_cannot_be_loaded_are_the_verdict(tmp_path: Path) -> None:
    target, drafter = tiny_coder.pair()
    for arguments in ((str(tmp_path / "nonesuch.gguf"),), ("--target", str(drafter))):
        done = run_here("doctor", "--json", *arguments)
        told = json.loads(done.stdout)
        assert done.returncode == 1 and told["alarms"][0]["name"] == "not_loaded"
        assert told["machine"]["llama_cpp"] and str(tmp_path) not in done.stdout
    done = run_here("doctor", "--ctx", "10000000", str(target), "--draft", str(drafter))
    assert done.returncode == 1 and "10000000" in done.stdout.splitlines()[0]
