"""The defaults of requests, by the place that the pair comes from."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dflash_local
import tiny_coder
from dflash_local import Model
from dflash_local.gguf.file import GgufFile
from dflash_local.pairs import registry
from dflash_local.pairs.defaults import CHAT_SAMPLING, Defaults, defaults_of, draft_window_of
from dflash_local.server.answering.chat import prepare_chat
from dflash_local.server.answering.sampling_fields import SamplingFields

TARGET, DRAFTER = map(GgufFile.open, tiny_coder.pair())


@pytest.fixture(autouse=True)
def without_the_tests_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.ENVIRONMENT)


def from_hub(file: GgufFile, repo: str) -> GgufFile:
    folder = f"models--{repo.replace('/', '--')}"
    return replace(file, path=Path("/cache/hub", folder, "snapshots", "0" * 40, file.path.name))


def converted_from(source: str) -> GgufFile:
    """The drafter, as the converter would have written it from this repository."""
    return replace(DRAFTER, metadata={**DRAFTER.metadata, "dflash_local.source": source})


def test_files_of_no_known_pair_have_none() -> None:
    other = replace(TARGET, path=TARGET.path.with_name("other.gguf"))
    assert defaults_of(other, DRAFTER) == defaults_of(other, None) == Defaults()
    assert Defaults().for_chats == CHAT_SAMPLING and CHAT_SAMPLING["temperature"] == 0.8


def test_chats_are_sampled_where_the_model_says_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "sampling", {})
    assert model.chat_sampling(None) == CHAT_SAMPLING
    raw = model.generate("def add(a, b):", max_tokens=8, seed=1)
    assert raw.tokens == model.generate("def add(a, b):", max_tokens=8, temperature=0).tokens


def test_a_converted_drafter_tells_its_pair() -> None:
    converted = converted_from("z-lab/Qwen3-8B-DFlash-b16")
    found = defaults_of(TARGET, converted)
    assert found.thinking is False and found.sampling["temperature"] == 0.7
    assert found.answer_length == 32768
    off, usual = found.lines()
    assert "thinking is off" in off and "answers of at most 32768 tokens" in usual
    assert draft_window_of(converted) == 3072
    assert draft_window_of(DRAFTER) == draft_window_of(None) == 0


def test_sampling_follows_what_chats_are_asked_for() -> None:
    thinks, plainly = (0.6, 0.95), (0.7, 0.8)

    def found(source: str | None, thinking: bool | None) -> tuple[float, float]:
        draft = converted_from(source) if source else DRAFTER
        target = from_hub(TARGET, "Qwen/Qwen3-8B-GGUF")
        sampling = defaults_of(target, draft, thinking).sampling
        return sampling["temperature"], sampling["top_p"]

    without = "z-lab/Qwen3-8B-DFlash-b16"  # trained so
    assert [found(without, each) for each in (None, True, False)] == [plainly, thinks, plainly]
    either = "deepseek-ai/dflash_qwen3_8b_block7"
    assert [found(either, each) for each in (None, True, False)] == [thinks, thinks, plainly]
    # its template thinks if it is not asked
    assert [found(None, each) for each in (None, False)] == [thinks, plainly]


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Names the tests' pair `mine`, with these lines of its table."""

    def write(lines: str) -> None:
        own = tmp_path / "own.toml"
        files = f"gguf = '{TARGET.path}'\ndrafter = '{DRAFTER.path}'\n"
        own.write_text(f"[mine]\n{files}thinking = false\n{lines}")
        monkeypatch.setenv(registry.ENVIRONMENT, str(own))

    return write


def test_a_pair_of_ones_own_files_has_its_defaults(register: Callable[[str], None]) -> None:
    register("training_length = 512\nanswer_length = 20\nsampling = { temperature = 0.25 }\n")
    with dflash_local.load("mine", n_gpu_layers=0, n_ctx=1024, quiet=True) as model:
        assert (model.sampling, model.thinking) == ({"temperature": 0.25}, False)
        assert model.plan and model.plan.draft_window == 512
        asked = [{"role": "user", "content": "Write a function."}]
        assert len(model.chat(asked, ignore_eos=True).tokens) == 20
        assert len(model.chat(asked, ignore_eos=True, max_tokens=4).tokens) == 4
        assert len(model.generate("def f(", ignore_eos=True, max_tokens=24).tokens) == 24
    with dflash_local.load("mine", draft_window=0, n_ctx=1024, quiet=True) as model:
        assert model.plan and model.plan.draft_window == 0


def test_a_file_in_the_hubs_cache_tells_its_repository() -> None:
    alone = defaults_of(from_hub(TARGET, "Qwen/Qwen3-8B-GGUF"), None)
    assert (alone.sampling["top_k"], alone.thinking) == (20, None)
    ready = from_hub(DRAFTER, "z-lab/Qwen3.5-35B-A3B-DFlash")
    assert defaults_of(TARGET, ready).thinking is True


def test_a_targets_file_may_advise_sampling() -> None:
    advice = {"general.sampling.temp": 0.5, "general.sampling.top_k": 3, "general.name": "x"}
    advised = replace(TARGET, metadata={**TARGET.metadata, **advice})
    assert defaults_of(advised, None).sampling == {"temperature": 0.5, "top_k": 3}
    odd = {"temp": math.nan, "top_k": -1, "top_p": "0.9", "min_p": 2.0, "penalty_last_n": 8.5}
    keys = {f"general.sampling.{name}": value for name, value in odd.items()}
    advised_oddly = replace(TARGET, metadata={**TARGET.metadata, **keys})
    assert defaults_of(advised_oddly, None).sampling == {"top_k": 0}
    known = from_hub(advised, "ggml-org/gpt-oss-20b-GGUF")
    assert defaults_of(known, None).sampling == {"temperature": 1.0, "top_p": 1.0}


def test_a_request_comes_before_the_pairs_own(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "sampling", {"temperature": 3.0, "top_k": 0, "min_p": 0.0})
    options = {"seed": 1, "max_tokens": 12}
    hot = model.generate("def add(a, b):", **options)
    greedy = model.generate("def add(a, b):", temperature=0, **options)
    assert hot.tokens != greedy.tokens
    monkeypatch.setattr(model, "sampling", {})
    assert model.generate("def add(a, b):", **options).tokens == greedy.tokens


def test_thinking_is_asked_of_the_template(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Template:
        def render(self, messages: object, begin: bool, **variables: object) -> str:
            asked.append(variables.get("enable_thinking"))
            return "x"

    monkeypatch.setattr(model, "_template", Template())
    messages = [{"role": "user", "content": "Hello"}]
    for thinking, given in (
        (None, None),
        (False, None),
        (False, {"enable_thinking": True}),
        (False, {"reasoning_effort": "high"}),
        (True, None),
    ):
        monkeypatch.setattr(model, "thinking", thinking)
        model.chat_prompt(messages, chat_template_kwargs=given)
    assert asked == [None, False, True, None, True]


def test_load_takes_a_folder(tmp_path: Path) -> None:
    (tmp_path / TARGET.path.name).symlink_to(TARGET.path)
    (tmp_path / "dflash-Q8_0.gguf").symlink_to(DRAFTER.path)
    with dflash_local.load(tmp_path, n_gpu_layers=0, n_ctx=256, quiet=True) as model:
        assert model.drafter is not None


def test_a_chat_that_says_whether_to_think_is_sampled_so(register: Callable[[str], None]) -> None:
    register(
        "sampling = { temperature = 0.0, presence_penalty = 0.5 }\n"
        "thinking_sampling = { temperature = 3.0, top_k = 0, min_p = 0.0, top_p = 1.0 }\n"
    )
    with dflash_local.load("mine", n_gpu_layers=0, n_ctx=1024, quiet=True) as model:
        hot = {"temperature": 3.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "presence_penalty": 0.0}
        for thinks in ({"enable_thinking": True}, {"reasoning_effort": "low"}):
            assert model.chat_sampling(thinks) == CHAT_SAMPLING | hot
        unthinking = {"reasoning_effort": "none"}
        assert model.chat_sampling(unthinking) == CHAT_SAMPLING | model.sampling
        assert model.chat_sampling(unthinking | {"enable_thinking": True}) == CHAT_SAMPLING | hot
        for says_nothing in (None, {}, {"enable_thinking": "yes"}):
            assert model.chat_sampling(says_nothing) == CHAT_SAMPLING | model.sampling
        model.thinking = True
        assert model.chat_sampling(None) == CHAT_SAMPLING | hot
        assert model.chat_sampling(unthinking) == CHAT_SAMPLING | model.sampling
        model.thinking = None
        asked = [{"role": "user", "content": "Write a function."}]
        options: dict[str, Any] = {"max_tokens": 16, "seed": 5, "ignore_eos": True}
        usual = model.chat(asked, **options).tokens
        assert model.chat(asked, chat_template_kwargs=thinks, **options).tokens != usual
        cold = {"temperature": 0.0, "presence_penalty": 0.5}
        assert model.chat(asked, chat_template_kwargs=thinks, **options, **cold).tokens == usual
        prepared = prepare_chat(model, asked, template_kwargs=thinks)
        assert prepared.options(SamplingFields(), max_tokens=None)["temperature"] == 3.0
        cool = SamplingFields(temperature=0.2)
        assert prepared.options(cool, max_tokens=None)["temperature"] == 0.2
        unasked = prepare_chat(model, asked)
        assert unasked.options(SamplingFields(), max_tokens=None)["temperature"] == 0.0
