"""The text is that of plain decoding, whatever a drafter proposes; only the gain differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_coder
from adversarial import ScriptedDrafter, always_wrong, oracle, right_for
from dflash_local.draft.draft import ANCHOR, Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.draft.shape import DraftShape
from dflash_local.engine import slots
from dflash_local.engine.engine import Engine
from dflash_local.errors import BackendError, InputError
from dflash_local.target_model.target import Target
from pair_engine import answer, consistent
from pair_engine import request as asked
from plain_answer import PlainAnswer
from shapes import SHAPES, exact_file, exact_target

N = 32
SEEDED = {"temperature": 0.8, "seed": 5, "repeat_penalty": 1.1}


class Targets:
    """One for each shape of drafts, opened when it is asked for."""

    def __init__(self, request: pytest.FixtureRequest, stack: ExitStack) -> None:
        self._request, self._stack = request, stack
        self._open: dict[DraftShape, Target] = {}

    def __getitem__(self, shape: DraftShape) -> Target:
        if shape not in self._open:
            opened = exact_target(shape, exact_file(shape, self._request))
            self._open[shape] = self._stack.enter_context(opened)
        return self._open[shape]


@pytest.fixture(scope="module")
def targets(request: pytest.FixtureRequest) -> Iterator[Targets]:
    with ExitStack() as stack:
        yield Targets(request, stack)


class Known(PlainAnswer):
    """To be drafted with a shape."""

    def __init__(
        self,
        target: Target,
        text: str,
        max_tokens: int = N,
        shape: DraftShape = "chain",
        **params: Any,
    ) -> None:
        super().__init__(target, text, max_tokens, **params)
        self.shape = shape

    def check(self, drafter: Drafter, width: int = 16) -> Any:
        """The drafted answer, from empty caches: equal, and with counts that add up."""
        engine = Engine(self.target, drafter)
        stats = self.asked(engine, width, shape=self.shape).stats
        assert stats.emitted == len(self.tokens)
        assert stats.rounds == sum(stats.accepted_lengths.values())
        # One token is drawn from the prompt's last row, and each round draws one of its own.
        assert stats.emitted == 1 + stats.rounds + stats.accepted
        assert stats.accepted <= stats.drafted
        consistent(engine, drafter, len(self.text) - 1)
        engine.slots.forget_all()
        return stats


@pytest.fixture(scope="module", params=["greedy", "seeded", "seeded-tree"])
def known(targets: Targets, request: pytest.FixtureRequest) -> Known:
    """Of trees the chains in these tests are those that never fork."""
    shape: DraftShape = "tree" if request.param.endswith("tree") else "chain"
    params = SEEDED if request.param.startswith("seeded") else {}
    return Known(targets[shape], tiny_coder.prompts()["chat"][0], shape=shape, **params)


def ends_of_text(target: Target) -> list[int]:
    return [t for t in range(target.n_vocab) if target.vocabulary.ends_text(t)]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("width", [2, 8, 16])
def test_always_right_fills_every_round(known: Known, width: int) -> None:
    stats = known.check(ScriptedDrafter(oracle(known.text)), width)
    full, rest = divmod(N - 1, width)
    assert stats.accepted_lengths == {width: full} | ({rest: 1} if rest else {})
    # The last token of a round is the target's own, and nothing is drafted past `max_tokens`.
    assert stats.drafted == stats.accepted == N - 1 - stats.rounds


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [2, 16])
def test_always_wrong_is_plain_decoding(known: Known, width: int) -> None:
    drafter = ScriptedDrafter(always_wrong(known.text, known.target.n_vocab))
    stats = known.check(drafter, width)
    assert stats.accepted == 0
    assert stats.accepted_lengths == {1: N - 1}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("k", [1, 3, 7, 14])
def test_right_for_so_many_tokens(known: Known, k: int) -> None:
    stats = known.check(ScriptedDrafter(right_for(known.text, lambda: k, known.target.n_vocab)))
    lengths = dict(stats.accepted_lengths)
    lengths[k + 1] -= (N - 1) // (k + 1)
    assert {length: n for length, n in lengths.items() if n} == (
        {(N - 1) % (k + 1): 1} if (N - 1) % (k + 1) else {}
    )


@pytest.mark.one_in(2)
def test_right_for_another_number_each_round(known: Known) -> None:
    rounds = count()
    script = right_for(known.text, lambda: next(rounds) * 7 % 16, known.target.n_vocab)
    stats = known.check(ScriptedDrafter(script))
    assert len(stats.accepted_lengths) > 2


@pytest.mark.one_in(12)
@pytest.mark.parametrize("at", [0, 1, 5, 14])
def test_a_wrong_end_of_text_ends_nothing(known: Known, at: int) -> None:
    know, end = oracle(known.text), ends_of_text(known.target)[0]

    def script(anchor_at: int, anchor: int, n: int) -> Draft:
        tokens = know(anchor_at, anchor, n).tokens
        return Draft.chain([end if i == at else token for i, token in enumerate(tokens)])

    stats = known.check(ScriptedDrafter(script))
    assert max(stats.accepted_lengths) == at + 1


@pytest.mark.one_in(22)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 14, 15, 16, 17])
def test_a_right_end_of_text_ends_the_answer_with_it(
    targets: Targets, n: int, shape: DraftShape
) -> None:
    """At every place of a block; drafts behind it do not count."""
    # A digit is a token of its own, so the answer ends after n tokens.
    known = Known(targets[shape], "x = ", shape=shape, grammar=f"root ::= [0-9]{{{n}}}")
    assert len(known.tokens) == n + 1 and known.finish_reason == "stop"
    assert known.target.vocabulary.ends_text(known.tokens[-1])

    def script(anchor_at: int, anchor: int, n_draft: int) -> Draft:
        tokens = known.text[anchor_at + 1 : anchor_at + 1 + n_draft]
        return Draft.chain(tokens + known.tokens[-1:] * (n_draft - len(tokens)))

    for width in (2, 16):
        stats = known.check(ScriptedDrafter(script), width)
        assert stats.rounds == math.ceil(n / width)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("invalid", [-1, -(2**31), 2**31 - 1, None], ids=str)
@pytest.mark.parametrize("at", [0, 1, 14])
def test_ids_outside_the_vocabulary(known: Known, invalid: int | None, at: int) -> None:
    """Such a draft ends before them."""
    know, bad = oracle(known.text), known.target.n_vocab if invalid is None else invalid

    def script(anchor_at: int, anchor: int, n: int) -> Draft:
        tokens = know(anchor_at, anchor, n).tokens
        return Draft.chain([bad if i == at else token for i, token in enumerate(tokens)])

    stats = known.check(ScriptedDrafter(script))
    assert max(stats.accepted_lengths) == at + 1


@pytest.mark.one_in(2)
def test_empty_drafts(known: Known) -> None:
    stats = known.check(ScriptedDrafter(lambda *_: Draft.chain([])))
    assert stats.drafted == 0
    assert stats.rounds == N - 1


@pytest.mark.one_in(2)
def test_more_tokens_than_asked_for(known: Known) -> None:
    know = oracle(known.text)
    stats = known.check(ScriptedDrafter(lambda at, anchor, n: know(at, anchor, 3 * n + 5)), width=8)
    assert max(stats.accepted_lengths) == 8


@pytest.mark.one_in(2)
def test_fewer_tokens_than_asked_for(known: Known) -> None:
    know = oracle(known.text)
    stats = known.check(ScriptedDrafter(lambda at, anchor, n: know(at, anchor, min(n, 2))))
    assert max(stats.accepted_lengths) == 3


@pytest.mark.one_in(4)
@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_are_no_numbers(known: Known, logprob: float) -> None:
    know = oracle(known.text)

    def script(anchor_at: int, anchor: int, n: int) -> Draft:
        tokens = know(anchor_at, anchor, n).tokens
        return Draft.chain(tokens, [logprob] * len(tokens))

    assert max(known.check(ScriptedDrafter(script)).accepted_lengths) == 16


@pytest.mark.one_in(2)
def test_a_tree_is_refused_and_the_engine_goes_on(known: Known) -> None:
    """Also in a context that could fork, if chains are asked for."""
    tree = Draft([1, 2, 3], [ANCHOR, ANCHOR, 0])
    drafter = ScriptedDrafter(lambda *_: tree)
    engine = Engine(known.target, drafter)
    with pytest.raises(InputError, match=r"^this engine verifies chains; .* proposed a tree$"):
        answer(engine, known.prompt, 16, N, **known.params)
    drafter.script = oracle(known.text)
    assert known.ask(engine, shape=known.shape).tokens == known.tokens
    engine.slots.forget_all()


class Fault(Exception):
    """An error that no part of the engine knows."""


class FaultyDrafter(ScriptedDrafter):
    """Raises in the named method, the n-th time that it is called."""

    def __init__(self, script: Any, method: str, nth: int, *, n_seq: int = 1) -> None:
        super().__init__(script, n_seq=n_seq)
        self._method, self._left = method, nth

    def _called(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left == 0:
                raise Fault(method)

    def inject(self, seq: int, features: NDArray[np.float32]) -> None:
        self._called("inject")
        super().inject(seq, features)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._called("draft")
        return super().draft(requests)

    def truncate(self, seq: int, length: int) -> None:
        self._called("truncate")
        super().truncate(seq, length)


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    ("method", "nth"),
    # Injections are of the prompt, then one per round, then one at the end of the answer.
    [("inject", 1), ("inject", 5), ("draft", 1), ("draft", 3), ("inject", 2)],
)
def test_a_drafter_that_fails_is_put_aside_and_tried_again_later(
    known: Known,
    method: str,
    nth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "_ASIDE_S", 0.0 if nth < 3 else 60.0)
    drafter = FaultyDrafter(oracle(known.text), method, nth)
    engine = Engine(known.target, drafter)
    answers = [known.ask(engine, shape=known.shape) for _ in range(9)]
    assert all(sequence.tokens == known.tokens for sequence in answers)
    warned = [sequence.stats.warning for sequence in answers if sequence.stats.warning]
    assert set(warned) == {f"drafting is off for a while: the drafter failed: {method}"}
    if nth < 3:
        assert max(answers[-1].stats.accepted_lengths) == 16
        consistent(engine, drafter, len(known.text) - 1)
    else:
        assert answers[-1].stats.drafted == 0
    engine.slots.forget_all()


def test_answers_that_do_not_draft_do_not_hear_of_a_drafter_that_fails(
    request: pytest.FixtureRequest,
) -> None:
    """They share the passes of one that does."""
    with exact_target("chain", exact_file("chain", request), n_seq=2) as target:
        known = Known(target, tiny_coder.prompts()["code"][0])
        drafter = FaultyDrafter(oracle(known.text), "draft", 2, n_seq=2)
        engine = Engine(target, drafter, n_seq=2)
        both = [engine.begin(asked(known.prompt, width, N)) for width in (16, 0)]
        engine.run(both)
        assert [sequence.tokens for sequence in both] == 2 * [known.tokens]
        assert both[0].stats.warning is not None
        assert both[1].stats.warning is None


def test_a_drafter_that_is_back_is_not_asked_for_texts_that_it_has_lost(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of a fixed width goes on plainly, and does not disturb those that began since."""
    monkeypatch.setattr(slots, "_ASIDE_S", 0.0)

    class Watched(FaultyDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            for each in requests:
                assert self.length(each.seq) + len(each.features) == len(each.text)
            return super().draft(requests)

    with exact_target("chain", exact_file("chain", request), n_seq=2) as target:
        known = Known(target, tiny_coder.prompts()["code"][0])
        drafter = Watched(oracle(known.text), "draft", 1, n_seq=2)
        engine = Engine(target, drafter, n_seq=2)
        first = engine.begin(asked(known.prompt, 16, N))
        while not engine.slots.lacks_drafter:
            engine.step([first])
        second = engine.begin(asked(known.prompt, 16, N))
        engine.run([first, second])
        assert [sequence.tokens for sequence in (first, second)] == 2 * [known.tokens]
        assert first.stats.drafted == 0
        assert max(second.stats.accepted_lengths) == 16
        assert second.stats.warning is None


@pytest.mark.one_in(2)
def test_a_drafter_that_cannot_even_forget_leaves_the_engine_usable(known: Known) -> None:
    drafter = FaultyDrafter(oracle(known.text), "truncate", 1)
    engine = Engine(known.target, drafter)
    with pytest.raises(Fault, match="truncate"):
        for _ in range(9):
            known.ask(engine, shape=known.shape)
    assert not engine.slots[0].busy
    assert known.ask(engine, shape=known.shape).tokens == known.tokens
    engine.slots.forget_all()


@pytest.mark.one_in(9)
def test_a_drafter_that_miscounts_is_found_out(known: Known) -> None:
    """One draft is expected here; none and two are not passed over."""
    for n_drafts in (0, 2):

        class Miscounting(ScriptedDrafter):
            def draft(self, requests: Sequence[DraftRequest], n: int = n_drafts) -> list[Draft]:
                return [*super().draft(requests), Draft.chain([])][:n]

        engine = Engine(known.target, Miscounting(oracle(known.text)))
        with pytest.raises(ValueError):
            known.ask(engine, shape=known.shape)
        assert known.ask(engine, 0).tokens == known.tokens
        engine.slots.forget_all()


@pytest.mark.one_in(2)
def test_what_fails_in_the_target_beside_a_draft_is_not_the_drafter_s_fault(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(known.target, ScriptedDrafter(oracle(known.text)))

    def fail(_target: Target) -> None:
        raise BackendError("no room")

    with monkeypatch.context() as patched, pytest.raises(BackendError, match="no room"):
        patched.setattr(Target, "tidy", fail)
        known.ask(engine, shape=known.shape)
    assert not engine.slots.lacks_drafter
    assert max(known.ask(engine, shape=known.shape).stats.accepted_lengths) == 16
    engine.slots.forget_all()
