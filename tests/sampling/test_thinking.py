"""The budget for thoughts: when their end is forced, and when not."""

from collections.abc import Sequence

import numpy as np
import pytest

from dflash_local.sampling.thinking import ThinkingBudget, ThoughtLimit

WORDS = [
    b"a",
    b"b",
    b"<think>",
    b"</think>",
    b"<thi",
    b"nk>",
    b"</thi",
    b"\n",
    "é".encode(),
    b"\xc3",
]
A, B, OPEN, CLOSE, OPEN_1, OPEN_2, CLOSE_1, LINE, WHOLE, CUT = range(len(WORDS))
CUT_REST = len(WORDS)
WORDS.append(b"\xa9")
END = (B, CLOSE)
FREE = None


def forced_after(
    tokens: Sequence[int], n: int = 3, *, is_open: bool = False, begun: tuple[int, ...] = ()
) -> int | None:
    """The one token that may come after these, if there is only one."""
    budget = ThinkingBudget(n, (b"<think>", b"</think>"), END, is_open, begun)
    limit = ThoughtLimit(budget, WORDS.__getitem__, None)
    assert limit.n_valid(tokens) == len(tokens)
    for token in tokens:
        assert limit.allows(token)
        limit.accept(token)
    allowed = [token for token in range(len(WORDS)) if limit.allows(token)]
    assert allowed == ([*range(len(WORDS))] if limit.forced is None else [limit.forced])
    assert all((limit.n_valid([token]) == 1) == (token in allowed) for token in range(len(WORDS)))
    return allowed[0] if len(allowed) == 1 else FREE


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], FREE),
        ([OPEN], FREE),
        ([OPEN, A, A], FREE),
        ([OPEN, A, A, A], B),
        ([OPEN, A, A, A, B], CLOSE),
        ([OPEN, A, A, A, B, CLOSE], FREE),
        ([OPEN, A, A, A, B, CLOSE, OPEN, A, A, A], FREE),  # in the answer it is text
        ([LINE, OPEN_1, OPEN_2, A, A, A], B),  # however the mark was cut
        ([OPEN, A, CLOSE, A, A, A], FREE),  # it ended by itself
        ([OPEN, A, CLOSE_1, OPEN_2, A, A], FREE),
        ([OPEN, A, A, CLOSE], FREE),  # with the last token of the budget
        ([OPEN, A, A, WHOLE], B),
        ([OPEN, A, A, CUT], FREE),  # a character is not cut
        ([OPEN, A, A, CUT, CUT_REST], B),
        ([A, OPEN, A, A, A, A], FREE),  # no thoughts, but text with their mark
        ([A, A, A, A], FREE),
    ],
)
def test_their_end_is_forced_after_so_many_tokens(tokens: list[int], expected: int | None) -> None:
    assert forced_after(tokens) == expected


def test_a_prompt_may_end_inside_of_them() -> None:
    assert forced_after([], 0, is_open=True) == B
    assert forced_after([A, A, A], is_open=True) == B
    assert forced_after([A], is_open=True, begun=(A, A)) == B
    assert forced_after([A, A, A], is_open=True, begun=(CLOSE,)) is FREE


def test_no_draft_may_pass_over_it() -> None:
    budget = ThinkingBudget(2, (b"<think>", b"</think>"), END, is_open=True)
    limit = ThoughtLimit(budget, WORDS.__getitem__, None)
    assert limit.n_valid([A, A, A]) == 2
    assert limit.n_valid([A, A, B, A]) == 3
    assert limit.n_valid([A, A, B, CLOSE, A, A]) == 6
    assert limit.n_valid([CLOSE, A, A, A]) == 4


class _Only:
    """A rule that allows one token first, and others behind it."""

    def __init__(self, first: int, *later: int) -> None:
        self._allowed = [first]
        self._later = [first, *later]

    def allows(self, token: int) -> bool:
        return token in self._allowed

    def mask(self, logits: np.ndarray) -> None:
        logits[[token for token in range(len(logits)) if not self.allows(token)]] = -np.inf

    def accept(self, token: int) -> None:
        assert self.allows(token)
        self._allowed = self._later

    def n_valid(self, tokens: Sequence[int]) -> int:
        each = zip([self._allowed] + [self._later] * len(tokens), tokens, strict=False)
        return next((i for i, (now, token) in enumerate(each) if token not in now), len(tokens))


@pytest.mark.parametrize(
    ("rule", "text", "is_open"),
    [
        (_Only(A), [A, A, A], True),
        (_Only(A, *END), [A, A, A], True),  # the rule's own text, no thoughts: a schema's, say
        (_Only(OPEN, A), [OPEN, A, A, A], False),
    ],
)
def test_what_another_rule_forbids_is_not_forced(
    rule: _Only, text: list[int], is_open: bool
) -> None:
    budget = ThinkingBudget(1, (b"<think>", b"</think>"), END, is_open)
    limit = ThoughtLimit(budget, WORDS.__getitem__, rule)
    for token in text:
        assert limit.forced is None and limit.allows(token)
        logits = np.zeros(len(WORDS), np.float32)
        limit.mask(logits)
        assert {*np.flatnonzero(np.isfinite(logits))} == {i for i in range(11) if rule.allows(i)}
        limit.accept(token)
