"""An ordinary small model as a drafter: answers are those of plain decoding, and what it drafts is
what it would write itself, whatever was rejected, cut back, shared or restored before."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mini_pair
import tiny_coder
from dflash_local import load
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.model_drafter import ModelDrafter
from dflash_local.engine.engine import Engine
from dflash_local.errors import FileError, InputError, PairError
from dflash_local.fit.pairing import check_pair
from dflash_local.gguf.file import GgufFile
from dflash_local.prefixes.store import PrefixStore
from dflash_local.target_model.taps import StoredFeatures
from dflash_local.target_model.target import Target
from elsewhere import controller
from gguf_files import ARRAY, STRING, edited, of_architecture
from hybrid import write_hybrid
from hybrid_engine import hybrid_target
from long_text import PYTHON_SOURCE
from pair_engine import answer, consistent, open_target, request
from plain_answer import PlainAnswer, asked_at_once
from small_model import model_drafter, write_small

N = 28
SEEDED = {"temperature": 0.8, "seed": 5, "repeat_penalty": 1.1}
WAYS = {"greedy": {}, "seeded": SEEDED}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    return write_small(path, mini_pair.pair()[0], n_layer=1)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """A target whose verification is exact to the bit."""
    with open_target(n_ctx=2048, n_seq=4, n_batch=64, tapped_layers=()) as opened:
        yield opened


@pytest.fixture(scope="module")
def known(target: Target) -> dict[str, list[PlainAnswer]]:
    texts = [*tiny_coder.prompts()["code"][:2], *tiny_coder.prompts()["chat"][:2]]
    return {
        way: [PlainAnswer(target, text, N, **params) for text in texts]
        for way, params in WAYS.items()
    }


def empty(target: Target, drafter: ModelDrafter, n_seq: int = 4, **options: Any) -> Engine:
    engine = Engine(target, drafter, n_seq, **options)
    engine.slots.forget_all()
    return engine


@pytest.fixture(params=["always right", "small"])
def drafter(target: Target, small: Path, request: pytest.FixtureRequest) -> Iterator[ModelDrafter]:
    opened = model_drafter(target, small if request.param == "small" else None)
    yield opened
    opened.close()


def own_drafts(drafter: ModelDrafter, text: list[int], n: int) -> list[int]:
    """Its draft after a text that it never saw."""
    for seq in range(len(drafter._texts)):
        drafter.truncate(seq, 0)
    *before, anchor = text
    features = StoredFeatures(drafter._model, [0] * len(before), before)
    (draft,) = drafter.draft([DraftRequest(0, anchor, features, n, whole=True)])
    drafter.truncate(0, 0)
    return draft.tokens


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [4, 9, "auto"])
def test_one_answer(
    target: Target,
    known: dict[str, list[PlainAnswer]],
    drafter: ModelDrafter,
    way: str,
    width: int | str,
) -> None:
    engine = Engine(target, drafter, 4, controller("cheap") if width == "auto" else None)
    accepted = 0
    for plain in known[way][1:3]:
        engine.slots.forget_all()
        found = plain.asked(engine, width)
        consistent(engine, drafter, len(plain.text) - 1)
        accepted += found.stats.accepted
    assert accepted > 0


def test_a_model_that_drafts_for_itself_is_always_right(
    target: Target, known: dict[str, list[PlainAnswer]]
) -> None:
    """Also where a text goes on from an earlier one, is cut, or shares another one's beginning."""
    drafter = model_drafter(target)
    plain = known["greedy"]
    cut = PlainAnswer(target, plain[0].prompt[:-7] + plain[1].prompt[-9:], N)
    engine = empty(target, drafter)
    for asked in (plain[0], cut, plain[0], plain[1], plain[1], cut):
        found = asked.asked(engine, 9)
        # Behind the last token there is nothing to compare with.
        assert found.stats.drafted - found.stats.accepted <= 8
        assert found.stats.rounds < len(found.tokens) / 2
    drafter.close()


@pytest.mark.parametrize(
    ("drafter", "way"), [("always right", "greedy"), ("small", "seeded")], indirect=["drafter"]
)
def test_four_at_once(
    target: Target, known: dict[str, list[PlainAnswer]], drafter: ModelDrafter, way: str
) -> None:
    engine = empty(target, drafter)
    for _ in range(2):  # the second time from what the slots have
        for found in asked_at_once(engine, known[way], (9, 4, 9, 2)):
            assert found.stats.accepted > 0


def test_drafts_know_nothing_of_rejected_ones(
    target: Target, known: dict[str, list[PlainAnswer]], small: Path
) -> None:
    """After an answer with many rejected drafts, it drafts what it drafts after that text alone."""
    drafter = model_drafter(target, small)
    engine, plain = empty(target, drafter), known["greedy"][2]
    plain.asked(engine, 9)
    (slot,) = (slot for slot in engine.slots if slot.cached == plain.text[:-1])
    features = StoredFeatures(target, [], [])
    asked = DraftRequest(slot.seq, plain.text[-1], features, 8, whole=True)
    (draft,) = drafter.draft([asked])
    assert len(draft.tokens) == 8
    (again,) = drafter.draft([asked])  # the first one was in vain
    assert again.tokens == draft.tokens == own_drafts(drafter, plain.text, 8)
    assert np.allclose(again.logprobs, draft.logprobs, atol=1e-4)
    drafter.close()


def test_a_long_prompt_comes_in_batches(target: Target, drafter: ModelDrafter) -> None:
    text = target.vocabulary.tokenize(PYTHON_SOURCE)[:300]
    found = PlainAnswer(target, text, 24).asked(empty(target, drafter), 9)
    assert found.stats.accepted > 0
    assert found.stats.prompt_tokens > 4 * target.n_batch


def test_what_left_its_slot_comes_back_with_what_the_drafter_knew(
    target: Target, known: dict[str, list[PlainAnswer]]
) -> None:
    drafter = model_drafter(target)
    engine = empty(target, drafter, 1, store=PrefixStore(64 << 20))
    first, other = PlainAnswer(target, PYTHON_SOURCE[:600], N), known["greedy"][0]
    first.asked(engine, 9)
    other.asked(engine, 9)
    found = first.asked(engine, 9)
    assert found.stats.cached_tokens == len(first.prompt) - 1
    assert engine.prefix_cache.reused["memory"] > 0
    assert found.stats.rounds < len(found.tokens) / 2
    drafter.close()


def test_a_draft_ends_with_the_text() -> None:
    with open_target(tiny_coder.pair()[0], tapped_layers=()) as target:
        drafter = model_drafter(target)
        plain = PlainAnswer(target, tiny_coder.prompts()["chat"][2], 60)
        assert plain.finish_reason == "stop"
        assert own_drafts(drafter, plain.text[:-3], 8) == plain.text[-3:]
        assert plain.asked(Engine(target, drafter), 9).stats.accepted > 20
        drafter.close()


def test_a_failure_puts_it_aside(target: Target, known: dict[str, list[PlainAnswer]]) -> None:
    """With too small a context of its own it fails in the middle of an answer."""
    plain = known["greedy"][2]
    drafter = model_drafter(target, n_ctx=256, n_seq=4)
    long = target.vocabulary.tokenize(PYTHON_SOURCE)[:240]
    engine = empty(target, drafter)
    found = PlainAnswer(target, long, N).asked(engine, 9)
    assert "the drafter failed: no room" in (found.stats.warning or "")
    assert plain.asked(engine, 9).stats.drafted == 0
    engine.slots._back_at = 0.0
    engine.slots.forget_all()
    assert plain.asked(engine, 9).stats.accepted > 0
    drafter.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["small", "recurrent"])
def test_loaded(small: Path, tmp_path: Path, kind: str) -> None:
    """Drafts are chains, whatever is asked for."""
    prompts = tiny_coder.prompts()["chat"][:2]
    if kind == "recurrent":
        small = write_hybrid(tmp_path / "hybrid.gguf", "qwen35", tiny_coder.pair()[0])
    options = {"kv_type": "q8_0", "n_ctx": 512, "n_threads": 1, "quiet": True, "n_seq": 2}
    with load(mini_pair.pair()[0], small, draft_shape="tree", **options) as model:
        assert isinstance(model.drafter, ModelDrafter)
        assert not model.target.options.tapped_layers
        assert model.plan is not None
        assert model.plan.drafter_name == small.name
        assert model.plan.drafter_bytes > 0 < model.plan.drafter_kv_bytes
        for way, prompt in zip(WAYS.values(), prompts, strict=True):
            plain = model.generate(prompt, max_tokens=N, draft_width=0, **way)
            for width in ("auto", 9):
                found = model.generate(prompt, max_tokens=N, draft_width=width, **way)
                assert found.text == plain.text
            assert found.stats.drafted > 0 == found.stats.tree_rounds
            assert found.stats.drafting == (
                "drafts are chains: this drafter gives only one token for each position"
            )


def test_a_recurrent_target(small: Path, tmp_path: Path) -> None:
    path = write_hybrid(tmp_path / "hybrid.gguf", "qwen35", tiny_coder.pair()[0])
    with hybrid_target(path, n_seq=2, tapped_layers=()) as target:
        texts = tiny_coder.prompts()["code"][:2]
        known = [PlainAnswer(target, text, N, **SEEDED) for text in texts]
        engine = Engine(target, model_drafter(target, small), 2)
        for found in asked_at_once(engine, known, (9, 4)):
            assert found.stats.drafted > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", ["qwen35", "lfm2"])
def test_a_recurrent_model_that_drafts_for_itself_is_always_right(
    tmp_path: Path, architecture: str
) -> None:
    """At once with others, where a text goes on from an earlier one, is cut, or shares another
    one's beginning, and after it was saved."""
    path = write_hybrid(tmp_path / "hybrid.gguf", architecture, tiny_coder.pair()[0])
    with hybrid_target(path, n_seq=3, n_ctx=1024, tapped_layers=()) as target:
        tokenize = target.vocabulary.tokenize
        first = tokenize(PYTHON_SOURCE)[:90]
        texts = [first, first[:60] + tokenize("\n\ndef add("), tokenize("def mean("), first]
        drafter = model_drafter(target, path)
        engine = Engine(target, drafter, 3, store=PrefixStore(64 << 20))
        for text in texts:
            stats = answer(engine, text, 9, N).stats
            assert 0 <= stats.drafted - stats.accepted <= 8
            assert stats.accepted > N / 4
        answers = [engine.begin(request(text, 9, N)) for text in texts[:3]]
        engine.run(answers)
        for found in answers:
            assert found.stats.drafted - found.stats.accepted <= 8
            assert found.stats.accepted > N / 4
        saved = drafter.save(0)
        (draft,) = drafter.draft([asked := DraftRequest(0, 300, StoredFeatures(target, []), 8)])
        drafter.truncate(0, drafter.length(0) - 5)
        drafter.restore(1, saved)
        (again,) = drafter.draft([replace(asked, seq=1)])
        assert again.tokens == draft.tokens


def test_a_recurrent_model_drafts_again_after_a_failure(tmp_path: Path) -> None:
    """It leaves nothing of a draft that failed half way."""
    path = write_hybrid(tmp_path / "hybrid.gguf", "qwen35", tiny_coder.pair()[0])
    with hybrid_target(path, n_seq=2, n_ctx=1024, tapped_layers=()) as target:
        prompt = target.vocabulary.tokenize(PYTHON_SOURCE)[:240]
        drafter = model_drafter(target, path, n_ctx=256)
        engine = Engine(target, drafter, 2)
        assert "no room" in (answer(engine, prompt, 9, N).stats.warning or "")
        for n in (60, 120):
            engine.slots._back_at = 0.0
            engine.slots.forget_all()
            stats = answer(engine, prompt[:n], 9, N).stats
            assert stats.warning is None
            assert 0 <= stats.drafted - stats.accepted <= 8


def test_its_vocabulary_must_be_the_target_s() -> None:
    target = GgufFile.open(tiny_coder.pair()[0])
    tokens = list(target.get("tokenizer.ggml.tokens"))
    tokens[7] = "another"
    other = edited(target, keys={"tokenizer.ggml.tokens": (tokens, ARRAY, STRING)})
    with pytest.raises(PairError, match="token 7 is 'another' in the drafter") as caught:
        check_pair(target, other)
    assert str(caught.value).count("\n") == 0
    with pytest.raises(FileError, match="'deepseek4', whose states were not tried in a drafter"):
        check_pair(target, of_architecture(target, "deepseek4"))


def test_a_width_beyond_its_block_is_refused(small: Path) -> None:
    with pytest.raises(InputError, match="draft_width is 10; this drafter's block allows at most"):
        load(mini_pair.pair()[0], small, n_ctx=256, draft_width=10, n_threads=1, quiet=True)
