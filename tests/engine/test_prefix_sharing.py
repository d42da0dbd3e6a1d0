"""A prompt that begins as another one takes over what is there of it, wherever that is: in a slot
that rests or is at work, in host memory, on disk. The answer, and how well drafts do, are those of
a cold start."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mini_pair
import tiny_coder
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence
from dflash_local.loading import open_drafter, state_key
from dflash_local.prefixes.files import PrefixFiles
from dflash_local.prefixes.store import PrefixStore
from dflash_local.target_model import sequence_state
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from gap_rule import first_difference
from long_text import PYTHON_SOURCE
from pair_engine import answer, fused_drafter, open_engine, open_target
from pair_engine import request as asked
from recurrent import write_mamba
from shapes import SHAPES, assert_as_well_drafted, assert_equal, exact_target

N = 16
MIB = 1 << 20
SEEDED = {"temperature": 0.8, "seed": 3, "repeat_penalty": 1.3, "repeat_last_n": 200}
WAYS = ["slot", "shared", "busy", "memory", "disk"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine whose verification is exact to the bit."""
    with open_engine(n_ctx=2048, n_seq=3, n_batch=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def forking() -> Iterator[Engine]:
    """An engine whose trees round as little as can be."""
    with exact_target("tree", n_ctx=1024, n_seq=3) as target:
        yield Engine(target, fused_drafter(target), n_seq=3)


@pytest.fixture(scope="module")
def text(engine: Engine) -> list[int]:
    source = PYTHON_SOURCE
    return engine.target.vocabulary.tokenize(source[: len(source) // 2])


def store_of(engine: Engine, folder: Path | None = None, max_bytes: int = 64 * MIB) -> PrefixStore:
    """A new store for an engine, in `folder` if there is one."""
    files = None
    if folder:
        files = PrefixFiles(folder, state_key(engine.target, engine.drafter), 64 * MIB, pytest.fail)
    engine.prefix_cache.store = PrefixStore(max_bytes, files)
    return engine.prefix_cache.store


def empty(engine: Engine) -> None:
    engine.prefix_cache.store = PrefixStore(0)
    engine.slots.forget_all()


def cold(engine: Engine, prompt: list[int], width: int, **params: Any) -> Sequence:
    empty(engine)
    sequence = answer(engine, prompt, width, N, **params)
    assert sequence.stats.cached_tokens == 0
    return sequence


def warm(
    engine: Engine, way: str, before: list[int], prompt: list[int], folder: Path, **options: Any
) -> Sequence:
    """The answer to a prompt after one to `before`, whose content is to be had in some way only."""
    width, params = options.pop("width"), options
    empty(engine)
    store = store_of(engine, folder if way == "disk" else None)
    first = engine.begin(asked(before, width, 70 if way == "busy" else N, **params))
    if way == "busy":
        while len(first.tokens) < 40:
            engine.step([first])
    else:
        engine.run([first])
    if way in ("memory", "disk"):
        engine.prefix_cache.make_room(engine.target.n_ctx)
        assert [len(slot.cached) for slot in engine.slots] == [0, 0, 0]
        assert store.n_entries == 1
    if way == "disk":
        store.close()
        store = store_of(engine, folder)
        assert (store.n_entries, store.n_disk_entries) == (0, 1)
    counted = dict(engine.prefix_cache.reused)
    sequence = engine.begin(asked(prompt, width, N, **params))
    origin = "shared" if way == "busy" else way
    assert engine.prefix_cache.reused == counted | {origin: counted[origin] + 1}
    engine.run([sequence])
    engine.run([first])
    return sequence


def test_nothing_comes_from_the_texts_of_others(engine: Engine, text: list[int]) -> None:
    """Neither while both are read, nor after one has ended, nor from the store."""
    empty(engine)
    store_of(engine)
    owned = {owner: asked(text[:400], 8, N, owner=owner) for owner in ("a", "b", None)}
    together = [engine.begin(owned[owner]) for owner in ("a", "b")]
    engine.run(together)
    engine.prefix_cache.make_room(engine.target.n_ctx)
    other = engine.begin(owned[None])
    engine.run([other])
    assert [each.stats.cached_tokens for each in (*together, other)] == [0, 0, 0]
    again = engine.begin(owned["b"])
    engine.run([again])
    assert again.stats.cached_tokens == 399
    empty(engine)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [SEEDED, {}], ids=["penalised", "greedy"])
@pytest.mark.parametrize("way", WAYS)
def test_the_second_answer_is_the_first(
    request: pytest.FixtureRequest,
    text: list[int],
    way: str,
    options: dict[str, Any],
    shape: DraftShape,
    tmp_path: Path,
) -> None:
    """Tokens, their log-probabilities, and round by round how many drafts were accepted. Of trees
    the slot, with all its branches, has been used, and goes on."""
    engine = request.getfixturevalue("engine" if shape == "chain" else "forking")
    # What a slot would lose is too much, or nothing.
    before, prompt = text[:200], text[:120] if way == "shared" else text[:200]
    width, options = 8 if shape == "chain" else 32, {"shape": shape, "logprobs": 2, **options}
    expected = cold(engine, prompt, width, **options)
    found = warm(engine, way, before, prompt, tmp_path, width=width, **options)
    assert found.stats.cached_tokens == len(prompt) - 1
    assert_equal(found, expected)
    assert_as_well_drafted(found.stats, expected.stats)
    assert (found.stats.tree_rounds > 0) == (shape == "tree")


@pytest.mark.parametrize("way", ["shared", "busy", "memory", "disk"])
def test_what_two_prompts_have_in_common_is_not_computed_again(
    engine: Engine, text: list[int], way: str, tmp_path: Path
) -> None:
    """A chat whose last turn is another one."""
    other = engine.target.vocabulary.tokenize(tiny_coder.prompts()["code"][0])
    before, prompt = text[:300], text[:200] + other
    at = first_difference(before, prompt)
    expected = cold(engine, prompt, 8)
    assert expected.stats.accepted > N / 4  # a drafter without its rows would do a fraction of this
    found = warm(engine, way, before, prompt, tmp_path, width=8)
    assert found.stats.cached_tokens == at
    assert found.tokens == expected.tokens
    assert found.stats.accepted_lengths == expected.stats.accepted_lengths


def test_many_slots_of_one_beginning_fill_the_cache_once(engine: Engine, text: list[int]) -> None:
    empty(engine)
    first = engine.begin(asked(text[:400], 4, 8))
    while first.in_prompt:
        engine.step([first])
    others = [engine.begin(asked(text[:380] + text[5 * i : 5 * i + 9], 4, 8)) for i in (1, 2)]
    assert [s.stats.cached_tokens for s in others] == [380, 380]
    n_ctx = engine.target.n_ctx
    assert engine.slots.free_cells == n_ctx - len(first.slot.cached)
    engine.run([first, *others])
    lengths = [len(slot.cached) for slot in engine.slots]
    assert engine.slots.free_cells == n_ctx - sum(lengths) + 2 * 380
    # As many as are said to be free can be had, and no more.
    free = engine.slots.free_cells
    tokens = text[:1] * free
    slot = others[0].slot
    for begin in range(0, free, engine.target.n_batch):
        chunk = tokens[begin : begin + engine.target.n_batch]
        at = len(slot.cached)
        batch = Batch()
        batch.add(slot.seq, at, chunk, outputs="none")
        engine.slots.decode(batch)
        slot.cached += chunk
    assert engine.slots.free_cells == 0
    one_more = Batch()
    one_more.add(slot.seq, len(slot.cached), [1])
    with pytest.raises(Exception, match="no room"):
        engine.slots.decode(one_more)
    engine.slots.forget_all()
    assert engine.slots.free_cells == n_ctx


def test_a_short_request_does_not_evict_a_long_chat(engine: Engine, text: list[int]) -> None:
    empty(engine)
    answer(engine, text[:700], 0, 2)
    for i in range(1, 9):
        answer(engine, text[50 * i : 50 * i + 90], 0, 2)
    assert answer(engine, text[:700], 0, 2).stats.cached_tokens == 699


def test_saved_bytes_that_do_not_fit_are_refused(engine: Engine, text: list[int]) -> None:
    """llama.cpp neither crashes on them nor keeps a part."""
    empty(engine)
    sequence = answer(engine, text[:300], 0, 2)
    context, seq = engine.target.context, sequence.slot.seq
    state = sequence_state.save(context, seq)
    assert sequence_state.restore(context, seq, state)
    flipped = state.copy()
    flipped[8:12] = 0xFF  # how many cells there are
    longer = np.concatenate([state, state[:9]])
    for bad in (state[:0], state[:7], state[:1000], state[:-1], longer, flipped):
        assert not sequence_state.restore(context, seq, bad)
        assert sequence_state.size_of(context, seq) < 100
    engine.slots.forget_all()
    assert engine.slots.free_cells == engine.target.n_ctx
    expected = sequence.tokens
    assert answer(engine, text[:300], 0, 2).tokens == expected


def test_a_window_that_has_moved_on_is_decoded_again(engine: Engine, text: list[int]) -> None:
    """Of a text that is cut far back the drafter has no rows left that it would look at."""
    with open_target(n_ctx=2048, n_seq=2) as target:
        drafter = open_drafter(mini_pair.pair()[1], target, n_seq=2, n_ctx=2048, draft_window=64)
        windowed = Engine(target, drafter, n_seq=2)
        prompt = text[:300] + target.vocabulary.tokenize(tiny_coder.prompts()["code"][0])
        expected = cold(windowed, prompt, 8)
        empty(windowed)
        answer(windowed, text[:900], 8, 2)
        found = answer(windowed, prompt, 8, N)
        at = first_difference(text[:900], prompt)
        assert at is not None and found.stats.cached_tokens == at - 64
        assert found.tokens == expected.tokens
        assert found.stats.accepted_lengths == expected.stats.accepted_lengths
        store_of(windowed)
        windowed.prefix_cache.make_room(2048)
        back = answer(windowed, prompt, 8, N)
        assert back.stats.cached_tokens == len(prompt) - 1
        assert windowed.prefix_cache.reused["memory"] == 1
        assert back.stats.accepted_lengths == expected.stats.accepted_lengths


def test_a_recurrent_target_keeps_to_its_slots(text: list[int], tmp_path: Path) -> None:
    """Its state cannot be cut, so that only a whole text can go on."""
    path = write_mamba(tmp_path / "mamba.gguf", tiny_coder.pair()[0])
    with Target(path, TargetOptions(n_ctx=512, n_seq=2, n_threads=1)) as target:
        recurrent = Engine(target, None, n_seq=2)
        prompts = [text[:100], text[:150], text[:70], text[200:300]]
        expected = [cold(recurrent, prompt, 0).tokens for prompt in prompts]
        empty(recurrent)
        store = store_of(recurrent)
        first = answer(recurrent, prompts[0], 0, N)
        longer = prompts[0] + first.tokens + text[:5]
        assert answer(recurrent, longer, 0, 1).stats.cached_tokens == len(prompts[0]) + N - 1
        for _ in range(2):
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert answer(recurrent, prompt, 0, N).tokens == tokens
        assert store.n_entries == 0


def test_the_key_tells_what_cannot_be_exchanged(engine: Engine) -> None:
    key = state_key(engine.target, engine.drafter)
    assert key == state_key(engine.target, engine.drafter)
    assert key != state_key(engine.target, None)
    n_ctx = engine.target.options.n_ctx
    for changed in ({"kv_type": "f16"}, {"n_ctx": 2 * n_ctx}):
        with open_engine(**{"n_ctx": n_ctx, **changed}) as other:
            assert state_key(other.target, other.drafter) != key
    with open_engine(
        n_ctx=n_ctx, n_seq=2, n_batch=engine.target.options.n_batch
    ) as other:  # which takes the same bytes
        assert state_key(other.target, other.drafter) == key
