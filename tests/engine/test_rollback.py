"""Roll-back as a property: after any history of accepts and rejects, what comes next is what comes
after a fresh prefill of the same tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tiny_coder
from dflash_local.draft.draft import ANCHOR, Candidates, Draft
from dflash_local.draft.drafter import DraftRequest, WrappedDrafter
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.target_model.target import Target
from pair_engine import answer, consistent, fused_drafter, open_target, prefill
from plain_answer import plain_tokens
from shapes import NOISE, exact_target

N = 60


@dataclass
class Next:
    """The output of a target and a drafter after a text: all that later answers depend on."""

    logits: NDArray[np.float32]
    states: NDArray[np.float32]
    candidates: Candidates


class Bench:
    """An engine with a history, and a fresh target and drafter to compare it with."""

    def __init__(self, used: Target, fresh: Target) -> None:
        self.fresh, self.fresh_drafter = fresh, fused_drafter(fresh)
        prompt = used.vocabulary.tokenize(tiny_coder.prompts()["code"][0])
        # Two texts that begin alike; the target itself goes on with either from `begin`.
        self.begin = len(prompt)
        other = [*prompt[: len(prompt) // 2], *prompt[:3] * len(prompt)][: len(prompt)]
        self.texts = [p + plain_tokens(used, p, N) for p in (prompt, other)]
        self.text = self.texts[0]
        self.drafter = fused_drafter(used)
        self.n_right: list[int] = []
        self.shape: DraftShape = "chain"
        self.n_tree_rounds = 0
        self.engine = Engine(used, WrappedDrafter(self.drafter, self._meddle))

    def _meddle(self, request: DraftRequest, draft: Draft) -> Draft:
        """As many right tokens as is said next, then wrong ones."""
        anchor_at = self.drafter.length(request.seq)
        right = self.text[anchor_at + 1 : anchor_at + 1 + len(draft)]
        good = self.n_right.pop() if self.n_right else 0
        n_vocab = self.engine.target.n_vocab
        if self.shape == "chain":
            return Draft.chain(right[:good] + [(token + 1) % n_vocab for token in right[good:]])
        # Beside each right token a wrong one, before it and after it in turn, with another one
        # below; no right one is beyond the first two ranks of a usual tree.
        tokens: list[int] = []
        parents: list[int] = []
        parent = ANCHOR
        for depth, token in enumerate(right[: good + 1]):
            pair = [token, (token + 1) % n_vocab][:: 1 - 2 * ((anchor_at + depth) % 2)]
            first = len(tokens)
            tokens += [*pair, (token + 2) % n_vocab]
            is_right = first + pair.index(token)
            parents += [parent, parent, 2 * first + 1 - is_right]
            parent = is_right
            if depth == good:  # here it is wrong, too
                tokens[is_right] = (token + 3) % n_vocab
        return Draft(tokens, parents)

    def run(
        self, n_prompt: int, n: int, width: int, n_right: list[int], shape: DraftShape = "chain"
    ) -> list[int]:
        """Answer the first `n_prompt` tokens of the text with `n`; the caches' tokens then."""
        self.n_right, self.shape = list(n_right), shape
        sequence = answer(self.engine, self.text[:n_prompt], width, n, shape=shape)
        assert sequence.tokens == self.text[n_prompt : n_prompt + n]
        self.n_tree_rounds += sequence.stats.tree_rounds
        return self.engine.slots[0].cached

    def next_after_history(self, anchor: int) -> Next:
        return self._next(self.engine.target, self.drafter, anchor)

    def next_after_prefill(self, cached: list[int], anchor: int) -> Next:
        self.fresh_drafter.truncate(0, 0)
        self.fresh_drafter.inject(0, prefill(self.fresh, cached))
        return self._next(self.fresh, self.fresh_drafter, anchor)

    @staticmethod
    def _next(target: Target, drafter: FusedDrafter, anchor: int) -> Next:
        length = drafter.length(0)
        features = np.zeros((0, drafter.n_features), np.float32)
        (draft,) = drafter.draft([DraftRequest(0, anchor, features, drafter.block_size - 1)])
        assert draft.candidates is not None
        target.decode([anchor], [length], [0], [True])
        found = Next(target.logits(0).copy(), target.hidden_states(), draft.candidates)
        target.truncate(0, length)
        return found


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_target(n_ctx=256) as used, open_target(n_ctx=256) as fresh:
        yield Bench(used, fresh)


Answered = tuple[int, int, int, int, list[int], DraftShape]
"""A request: text, tokens of the prompt beyond its beginning, tokens of the answer, width, right
drafts in each round, shape of these."""


def histories(
    widths: Sequence[int], most_right: int, shapes: Sequence[DraftShape]
) -> st.SearchStrategy[list[Answered]]:
    answered = st.tuples(
        st.integers(0, 1),
        st.integers(0, 40),
        st.integers(1, 20),
        st.sampled_from(widths),
        st.lists(st.integers(0, most_right), max_size=20),
        st.sampled_from(shapes),
    )
    return st.lists(answered, min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=25)
@given(histories([0, 2, 5, 9, 16], 15, ["chain"]))
def test_any_history_ends_as_a_fresh_prefill(bench: Bench, history: list[Answered]) -> None:
    """The engine keeps its caches from one example to the next, which is history too."""
    ours, fresh = after(bench, history)
    np.testing.assert_array_equal(ours.logits, fresh.logits)
    np.testing.assert_array_equal(ours.states, fresh.states)
    np.testing.assert_array_equal(ours.candidates.ids, fresh.candidates.ids)
    np.testing.assert_array_equal(ours.candidates.logprobs, fresh.candidates.logprobs)


def after(bench: Bench, history: list[Answered]) -> tuple[Next, Next]:
    """The output after some requests, and that after a prefill of the text they left."""
    cached: list[int] = []
    for text, n_more, n, width, n_right, shape in history:
        bench.text = bench.texts[text]
        n_prompt = bench.begin + n_more
        cached = bench.run(n_prompt, n, width, n_right, shape)
        # The last token of an answer is in no cache.
        assert cached == bench.text[: n_prompt + n - 1]
        if width:
            consistent(bench.engine, bench.drafter, len(cached))
        assert bench.drafter.length(0) <= len(cached)
    if bench.drafter.length(0) < len(cached):  # the last one drafted nothing: bring it up to date
        cached = bench.run(len(cached), 1, 16, [])
    anchor = bench.text[len(cached)]
    return bench.next_after_history(anchor), bench.next_after_prefill(cached, anchor)


@pytest.fixture(scope="module")
def forking() -> Iterator[Bench]:
    """Targets whose trees round as little as can be."""
    with exact_target("tree", n_ctx=256) as used, exact_target("tree", n_ctx=256) as fresh:
        yield Bench(used, fresh)


@pytest.mark.slow
def test_any_history_of_trees_and_chains_ends_as_a_fresh_prefill(forking: Bench) -> None:
    @settings(max_examples=10)
    @given(histories([0, 4, 9, 16], 5, ["tree", "tree", "chain"]))
    def check(history: list[Answered]) -> None:
        ours, fresh = after(forking, history)
        np.testing.assert_allclose(ours.logits, fresh.logits, atol=NOISE, rtol=0)
        apart = np.linalg.norm(ours.states - fresh.states) / np.linalg.norm(fresh.states)
        assert apart < NOISE
        # The drafter rounds these to eight bits.
        chances = [np.exp(found.candidates.logprobs) for found in (ours, fresh)]
        np.testing.assert_allclose(*chances, atol=0.05, rtol=0)

    check()
    assert forking.n_tree_rounds > 0
