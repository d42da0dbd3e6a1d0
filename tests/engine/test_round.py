"""The text is that of plain decoding, whatever a drafter proposes; only the gain differs."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_coder
from add_up import add_up
from adversarial import Script, ScriptedDrafter, oracle, right_for
from dflash_local.draft.draft import ANCHOR, Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.draft.shape import Chain, DraftShape
from dflash_local.engine import slots
from dflash_local.engine.engine import Engine
from dflash_local.errors import BackendError, InputError
from dflash_local.stats import Stats
from dflash_local.target_model.target import Target
from elsewhere import DECIDERS, controller
from pair_engine import Width, answer, consistent
from pair_engine import request as asked
from pairwise import pairwise_cases
from plain_answer import PlainAnswer
from shapes import SHAPES, exact_target

N = 32
SEEDED = {"temperature": 0.8, "seed": 5, "repeat_penalty": 1.1}


Targets = Callable[[DraftShape], Target]


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    """One for each shape of drafts, opened when it is asked for."""
    with ExitStack() as stack:
        yield cache(lambda shape: stack.enter_context(exact_target(shape)))


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

    def check(self, drafter: Drafter, how: int | str = 16) -> Stats:
        """The drafted answer, from empty caches, at a width or as a decider has it: equal, and
        with counts that add up."""
        width: Width = how if isinstance(how, int) else "auto"
        decider = controller(how) if isinstance(how, str) else None
        engine = Engine(self.target, drafter, 1, decider)
        found = self.asked(engine, width, shape=self.shape)
        stats = found.stats
        assert stats.emitted == len(self.tokens)
        assert stats.rounds == sum(stats.accepted_lengths.values())
        # One token is drawn from the prompt's last row, and each round draws one of its own.
        assert stats.emitted == 1 + stats.rounds + stats.accepted
        assert stats.accepted <= stats.drafted
        if decider:
            add_up(found)
        if not engine.slots[0].gave_up:
            consistent(engine, drafter, len(self.text) - 1)
        engine.slots.forget_all()
        return stats


KINDS: dict[str, tuple[DraftShape, dict[str, Any]]] = {
    "greedy": ("chain", {}),
    "seeded": ("chain", SEEDED),
    "seeded-tree": ("tree", SEEDED),  # chains are the trees that never fork
}


@pytest.fixture(scope="module")
def known_of(targets: Targets) -> Callable[..., Known]:
    """By its kind and length, each decoded once."""

    @cache
    def known(kind: str, n: int = N) -> Known:
        shape, params = KINDS[kind]
        return Known(targets(shape), tiny_coder.prompts()["chat"][0], n, shape, **params)

    return known


@pytest.fixture(scope="module", params=KINDS)
def known(known_of: Callable[..., Known], request: pytest.FixtureRequest) -> Known:
    return known_of(request.param)


Scripting = Callable[[Known], Script]


def right_for_so_many(n: Callable[[], int]) -> Scripting:
    return lambda known: right_for(known.text, n, known.target.n_vocab)


def right_but(change: Callable[[list[int], Known], Draft], length: int | None = None) -> Scripting:
    """The right draft, changed; `length`: of so many tokens, whatever was asked for."""

    def scripted(known: Known) -> Script:
        know = oracle(known.text)
        return lambda at, anchor, n: change(
            know(at, anchor, n if length is None else length).tokens, known
        )

    return scripted


def with_at(bad: Callable[[Target], int], at: int) -> Scripting:
    """Another token at one place."""
    return right_but(
        lambda tokens, known: Draft.chain(
            [bad(known.target) if i == at else token for i, token in enumerate(tokens)]
        )
    )


def with_logprobs(logprob: float) -> Scripting:
    return right_but(lambda tokens, _: Draft.chain(tokens, [logprob] * len(tokens)))


def of_length(n: int) -> Scripting:
    return right_but(lambda tokens, _: Draft.chain(tokens), n)


MANY = 64
made = count()
SCRIPTS: dict[str, tuple[Scripting, int | None]] = {
    "right": (lambda known: oracle(known.text), MANY),
    "wrong": (right_for_so_many(lambda: 0), 1),
    "right for 7": (right_for_so_many(lambda: 7), 8),
    "right for another number each round": (right_for_so_many(lambda: next(made) * 7 % 16), None),
    **{f"right for {k}": (right_for_so_many(lambda k=k: k), k + 1) for k in (1, 3, 14)},
    **{
        f"log-probabilities of {logprob}": (with_logprobs(logprob), MANY)
        for logprob in (math.nan, math.inf, -math.inf, 5.0, -1e30)
    },
    **{
        f"{name} at {at}": (with_at(bad, at), at + 1)
        for name, bad in {
            "an end of text": lambda target: target.vocabulary.ends[0],
            "-1": lambda _: -1,
            "the least integer": lambda _: -(2**31),
            "the largest integer": lambda _: 2**31 - 1,
            "the first that is no token": lambda target: target.n_vocab,
        }.items()
        for at in (0, 3, 14)
    },
    "nothing": (of_length(0), 1),
    "two tokens": (of_length(2), 3),
    "too many": (of_length(50), MANY),
}
"""The drafts, and the tokens that a round emits by them if the width allows it."""
EVERYWHERE = list(SCRIPTS)[:4]
CASES = [
    *pairwise_cases(list(SCRIPTS), (2, 8, 16), list(KINDS)),
    *pairwise_cases(EVERYWHERE, DECIDERS, ("greedy", "seeded")),
    *pairwise_cases(list(SCRIPTS)[4:], ("cheap", "even", "by lot"), ("greedy", "seeded")),
]


@pytest.mark.one_in(5)
@pytest.mark.usefixtures("as_far_ahead_as_allowed")
@pytest.mark.parametrize(("name", "how", "kind"), CASES)
def test_whatever_is_drafted(
    known_of: Callable[..., Known], name: str, how: int | str, kind: str
) -> None:
    known = known_of(kind, N if isinstance(how, int) else 48)
    script, per_round = SCRIPTS[name]
    stats = known.check(ScriptedDrafter(script(known)), how)
    n = len(known.tokens) - 1
    if name == "right":
        # The last token of a round is the target's own, and nothing is drafted past `max_tokens`.
        assert stats.accepted == stats.drafted
    if name == "nothing":
        assert stats.drafted == 0
    if isinstance(how, int):
        if per_round is None:
            assert len(stats.accepted_lengths) > min(2, how - 1)
        else:
            full, rest = divmod(n, min(per_round, how))
            expected = Counter({min(per_round, how): full}) + Counter([rest] if rest else [])
            assert stats.accepted_lengths == expected
        return
    assert max(stats.accepted_lengths) <= min(per_round or MANY, 16)
    if name == "right" and how == "cheap":  # at full width nearly from the start
        assert stats.rounds < n / 8
    if name == "wrong" and how not in ("cheap", "by lot"):
        assert stats.widths[1] > n / 2  # it is sure of each draft, and found out


@pytest.mark.one_in(12)
@pytest.mark.usefixtures("as_far_ahead_as_allowed")
@pytest.mark.parametrize(
    ("n", "how", "shape"),
    [
        *pairwise_cases((1, 2, 3, 8, 14, 15, 16, 17), (2, 16), SHAPES),
        *product((1, 2, 14, 15, 16, 17), ("cheap", "by the row", "hopeless", "by lot"), SHAPES[:1]),
    ],
)
def test_a_right_end_of_text_ends_the_answer_with_it(
    targets: Targets, n: int, how: int | str, shape: DraftShape
) -> None:
    """At every place of a block; drafts behind it do not count."""
    # A digit is a token of its own, so the answer ends after n tokens.
    known = Known(targets(shape), "x = ", shape=shape, grammar=f"root ::= [0-9]{{{n}}}")
    assert len(known.tokens) == n + 1 and known.finish_reason == "stop"
    assert known.target.vocabulary.ends_text(known.tokens[-1])

    def script(anchor_at: int, anchor: int, n_draft: int) -> Draft:
        tokens = known.text[anchor_at + 1 : anchor_at + 1 + n_draft]
        return Draft.chain(tokens + known.tokens[-1:] * (n_draft - len(tokens)))

    stats = known.check(ScriptedDrafter(script), how)
    if isinstance(how, int):
        assert stats.rounds == math.ceil(n / how)


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
    known: Known, method: str, nth: int, monkeypatch: pytest.MonkeyPatch
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


def test_answers_that_do_not_draft_do_not_hear_of_a_drafter_that_fails() -> None:
    """They share the passes of one that does."""
    with exact_target("chain", n_seq=2) as target:
        known = Known(target, tiny_coder.prompts()["code"][0])
        drafter = FaultyDrafter(oracle(known.text), "draft", 2, n_seq=2)
        engine = Engine(target, drafter, n_seq=2)
        both = [engine.begin(asked(known.prompt, width, N)) for width in (16, 0)]
        engine.run(both)
        assert [sequence.tokens for sequence in both] == 2 * [known.tokens]
        assert both[0].stats.warning is not None
        assert both[1].stats.warning is None


def test_a_drafter_that_is_back_is_not_asked_for_texts_that_it_has_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer of a fixed width goes on plainly, and does not disturb those that began since."""
    monkeypatch.setattr(slots, "_ASIDE_S", 0.0)

    class Watched(FaultyDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            for each in requests:
                assert self.length(each.seq) + len(each.features) == len(each.text)
            return super().draft(requests)

    with exact_target("chain", n_seq=2) as target:
        known = Known(target, tiny_coder.prompts()["code"][0])
        drafter = Watched(oracle(known.text), "draft", 1, n_seq=2)
        engine = Engine(target, drafter, n_seq=2)
        first = engine.begin(asked(known.prompt, 16, N))
        while not engine.slots.drafter_suspended:
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
    assert not engine.slots.drafter_suspended
    assert max(known.ask(engine, shape=known.shape).stats.accepted_lengths) == 16
    engine.slots.forget_all()


@pytest.mark.parametrize("few_counts", [True, False])
@pytest.mark.parametrize("n", range(1, 10))
def test_an_answer_ends_anywhere_in_a_block(targets: Targets, n: int, few_counts: bool) -> None:
    """Also in a draft that is longer than it, as where a GPU has a graph for one row count. What
    comes after `max_tokens` is not emitted, and not in the caches, which a second answer goes on
    with."""
    target = targets("chain")
    known = PlainAnswer(target, tiny_coder.prompts()["code"][0], 24)
    engine = Engine(target, ScriptedDrafter(oracle(known.text)))
    engine._chain = Chain(15, few_counts=few_counts)
    engine.run([first := engine.begin(asked(known.prompt, 8, n))])
    assert first.tokens == known.tokens[:n] and first.finish_reason == "length"
    assert set(first.stats.widths) <= {1, 8} or not few_counts
    engine.run([again := engine.begin(asked(known.text[:-12], 8, 12))])
    assert again.tokens == known.tokens[-12:]
    assert again.stats.cached_tokens >= len(known.prompt) + n - 2
    engine.slots.forget_all()
