"""Prompts that a target with recurrent layers has read in part: the kept states are right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.engine.engine import Engine
from dflash_local.fit.architectures import WayBack
from dflash_local.prefixes import checkpoints
from dflash_local.prefixes.files import PrefixFiles
from dflash_local.prefixes.prefix import SavedSequence
from dflash_local.prefixes.store import PrefixStore
from dflash_local.target_model.target import Target
from hybrid_engine import BLOCK, Knowing, hybrid_target, path, plain
from pair_engine import answer, request
from plain_answer import Plain

__all__ = ["path", "plain"]  # fixtures

N, N_PROMPT = 24, 150
KEPT = N_PROMPT - 32
"""Tokens before a prompt's end there is a checkpoint."""


@pytest.fixture(
    scope="module",
    params=[
        ("qwen35", "replay"),
        ("qwen35moe", "replay"),
        ("qwen3next", "replay"),
        ("lfm2", "replay"),
        ("lfm2moe", "replay"),
        ("lfm2", "snapshots"),
        ("nemotron_h", "snapshots"),
    ],
    ids="-".join,
)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An architecture, and how rejected rows are taken back."""
    return tuple(request.param)


@pytest.fixture(scope="module")
def target(path: Path, kind: tuple[str, Any]) -> Iterator[Target]:
    """Two slots."""
    with hybrid_target(path, n_seq=2, n_ctx=1024, way_back=WayBack(kind[1], BLOCK - 1)) as opened:
        yield opened


STEP, LONG = 64, 250
EMPTY = np.empty(0, np.uint8)


@pytest.fixture
def short_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints each 64 tokens, so that prompts of the tests are long."""
    monkeypatch.setattr(checkpoints, "BOUNDARY", STEP)


class Chat:
    """An engine whose answers are those of empty caches."""

    def __init__(self, target: Target, plain: Plain, store: PrefixStore | None = None) -> None:
        n_seq = target.options.n_seq
        for seq in range(n_seq):
            target.clear(seq)
        self.plain = plain
        self.rng = np.random.default_rng(4)
        self.drafter = None
        if target.max_width > 1:
            self.drafter = Knowing(lambda: int(self.rng.integers(16)), target.n_vocab, n_seq)
        self.engine = Engine(target, self.drafter, n_seq=n_seq, store=store)
        self.width = 16 if self.drafter else 0

    def tokens(self, n: int) -> list[int]:
        return self.rng.integers(0, 8000, n).tolist()

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt were not read again."""
        right = self.plain(prompt, N)
        if self.drafter:
            self.drafter.texts = [prompt + right]
        found = answer(self.engine, prompt, self.width, N)
        assert found.tokens == right
        return right, found.stats.cached_tokens


@pytest.fixture
def chat(target: Target, plain: Plain) -> Chat:
    return Chat(target, plain)


@pytest.mark.one_in(2)
def test_of_a_prompt_that_begins_as_earlier_ones_the_rest_is_read(chat: Chat) -> None:
    prompt = chat.tokens(N_PROMPT)
    said, n_cached = chat.ask(prompt)
    assert n_cached == 0
    turn = [*prompt, *said]
    # What it thought, and the opening of the thought before it, are not in the prompt any more.
    without = [*prompt[:-5], *said[-6:], *chat.tokens(90)]
    for asked, n_cached in (
        (prompt, KEPT),
        (prompt, KEPT),
        ([*turn, *chat.tokens(80)], len(turn) - 1),
        ([*turn, *chat.tokens(70)], KEPT),
        ([*turn, *chat.tokens(60)], KEPT),
        (without, KEPT),
        (without, len(without) - 32),
        ([*prompt[:-40], *chat.tokens(50)], 0),  # it forks off before the checkpoint
    ):
        assert chat.ask(asked)[1] == n_cached


def store_in(folder: Path) -> PrefixStore:
    key = {"of": folder.name}
    return PrefixStore(1 << 26, PrefixFiles(folder, key, 1 << 26, lambda _line: None))


@pytest.mark.one_in(6)
def test_texts_that_left_their_slots(target: Target, plain: Plain, tmp_path: Path) -> None:
    """They come back from memory and, after a restart, from disk, as they were at a checkpoint."""
    chat = Chat(target, plain, store_in(tmp_path))
    prompts = [chat.tokens(N_PROMPT) for _ in range(4)]
    said = [chat.ask(prompt) for prompt in prompts]
    assert [n for _, n in said] == [0] * 4
    following = [
        [*prompt, *answer_, *chat.tokens(70)]
        for prompt, (answer_, _) in zip(prompts, said, strict=True)
    ]
    assert [chat.ask(prompt)[1] for prompt in following[:2]] == [KEPT] * 2
    assert chat.engine.prefix_cache.reused["memory"] == 2
    chat.engine.prefix_cache.close()
    again = Chat(target, plain, store_in(tmp_path))
    assert again.ask([*prompts[2], 5, 6])[1] == KEPT
    assert again.engine.prefix_cache.reused["disk"] == 1
    again.engine.prefix_cache.close()


def all_along(chat: Chat, length: int, n_new: int) -> tuple[list[int], list[int]]:
    """A long prompt that has been answered, and one that leaves it after `length` tokens."""
    prompt = chat.tokens(LONG)
    assert chat.ask(prompt)[1] == 0
    return prompt, [*prompt[:length], *chat.tokens(n_new)]


@pytest.mark.one_in(4)
def test_a_cut_in_a_long_prompt_reads_on_from_a_boundary(
    target: Target, plain: Plain, short_boundaries: None
) -> None:
    chat = Chat(target, plain, PrefixStore(1 << 26))
    prompt, other = all_along(chat, 2 * STEP + 40, 70)
    assert chat.ask(other)[1] == 2 * STEP
    assert chat.ask([*prompt[: 2 * STEP - 1], *chat.tokens(30)])[1] == STEP
    assert chat.ask([*prompt[: STEP - 1], *chat.tokens(30)])[1] == 0


@pytest.mark.one_in(4)
def test_boundaries_come_back_from_memory_and_from_disk(
    target: Target, plain: Plain, short_boundaries: None, tmp_path: Path
) -> None:
    chat = Chat(target, plain, store_in(tmp_path))
    _, other = all_along(chat, 2 * STEP + 40, 40)
    for _ in range(2):
        chat.ask(chat.tokens(N_PROMPT))
    assert chat.ask(other)[1] == 2 * STEP
    assert chat.engine.prefix_cache.reused["memory"] == 1
    prompt, other = all_along(chat, STEP + 40, 40)
    chat.engine.prefix_cache.close()
    again = Chat(target, plain, store_in(tmp_path))
    assert again.ask(other)[1] == STEP
    assert again.engine.prefix_cache.reused["disk"] == 1
    assert again.ask([*prompt[: STEP + 9], *chat.tokens(40)])[1] == STEP
    again.engine.prefix_cache.close()


@pytest.mark.one_in(4)
def test_boundaries_keep_within_the_room_of_the_store(
    target: Target, plain: Plain, short_boundaries: None
) -> None:
    n_state = len(checkpoint_of(target))
    store = PrefixStore(8 * n_state + 100)
    chat = Chat(target, plain, store)
    prompt = all_along(chat, 0, 40)[0]
    kept = [slot.checkpoints.at_boundaries for slot in chat.engine.slots]
    assert sorted(map(len, kept)) == [0, 2]
    assert not store.put(SavedSequence([1], target=np.zeros(7 * n_state, np.uint8), drafter=EMPTY))
    chat.engine.slots.forget_all()
    assert chat.ask(prompt)[1] == 0


def checkpoint_of(target: Target) -> np.ndarray[Any, Any]:
    target.clear(0)
    target.decode([5], [0], [0], [True])
    state = target.checkpoint(0, 1).state
    target.clear(0)
    return state


@pytest.mark.one_in(4)
def test_two_at_once_read_what_they_share_once(chat: Chat, target: Target) -> None:
    shared = chat.tokens(N_PROMPT)
    prompts = [[*shared, 7, 8], [*shared, 9]]
    right = [chat.plain(prompt, N) for prompt in prompts]
    if chat.drafter:
        chat.drafter.texts = [p + r for p, r in zip(prompts, right, strict=True)]
    engine = chat.engine
    sequences = [engine.begin(request(prompt, chat.width, N)) for prompt in prompts]
    engine.run(sequences)
    assert [sequence.tokens for sequence in sequences] == right
    assert sum(s.stats.cached_tokens for s in sequences) >= KEPT


A_TURN = st.tuples(st.integers(0, 15), st.floats(0.5, 1), st.integers(1, 60))
"""The earlier text that a prompt begins with, the part of it, and the number of new tokens."""


@pytest.mark.one_in(7)
@given(st.lists(st.lists(A_TURN, min_size=1, max_size=2), min_size=3, max_size=8))
@settings(deadline=None, max_examples=4, derandomize=True)
def test_any_turns_are_those_of_empty_caches(
    target: Target, plain: Plain, turns: list[list[tuple[int, float, int]]]
) -> None:
    """Prompts that begin with parts of earlier texts, one or two at a time."""
    play(Chat(target, plain), turns)


@pytest.mark.parametrize("kind", [("qwen3next", "replay")], indirect=True, ids="-".join)
def test_a_slot_rounds_as_its_own_cells_make_it(chat: Chat) -> None:
    """A later row must not take a cell before earlier ones of its text, which another slot has
    freed. In this history one did, and another expert was chosen."""
    play(chat, [[(0, 1.0, 1), (0, 1.0, 15)], [(0, 1.0, 1), (0, 1.0, 52)], [(0, 1.0, 26)]])


def play(chat: Chat, turns: list[list[tuple[int, float, int]]]) -> None:
    """Answer such prompts, each as from empty caches."""
    texts: list[list[int]] = [chat.tokens(90)]
    for turn in turns:
        asked: list[list[int]] = []
        for which, share, n_new in turn:
            base = texts[which % len(texts)]
            asked.append([*base[: round(share * len(base))], *chat.tokens(n_new)][:400])
        right = [chat.plain(prompt, N) for prompt in asked]
        if chat.drafter:
            chat.drafter.texts = [p + r for p, r in zip(asked, right, strict=True)]
        sequences: list[Any] = [
            chat.engine.begin(request(prompt, chat.width, N)) for prompt in asked
        ]
        chat.engine.run(sequences)
        for sequence, tokens in zip(sequences, right, strict=True):
            assert sequence.tokens == tokens
        texts += [p + r for p, r in zip(asked, right, strict=True)]


@pytest.fixture(scope="module")
def single(path: Path, kind: tuple[str, Any]) -> Iterator[Target]:
    """One slot."""
    with hybrid_target(path, n_ctx=1024, way_back=WayBack(kind[1], BLOCK - 1)) as opened:
        yield opened


@pytest.mark.one_in(7)
@given(st.lists(st.tuples(st.integers(0, 15), st.floats(0, 1), st.integers(1, 150)), max_size=9))
@settings(deadline=None, max_examples=4, derandomize=True)
def test_any_cuts_are_those_of_empty_caches(
    single: Target, plain: Plain, turns: list[tuple[int, float, int]]
) -> None:
    """Prompts that leave earlier texts anywhere, with checkpoints all along them, which come from
    the slot or from a store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "BOUNDARY", STEP)
        chat = Chat(single, plain, PrefixStore(1 << 20))
    texts: list[list[int]] = [chat.tokens(200)]
    for which, share, n_new in turns:
        base = texts[which % len(texts)]
        prompt = [*base[: round(share * len(base))], *chat.tokens(n_new)][:400]
        right, _ = chat.ask(prompt)
        texts.append(prompt + right)
