"""The end of an editor's completion: between two lines."""

import random
from collections.abc import Iterator

import pytest

from dflash_local.server.llama.completion import LineLimits


def cut(pieces: list[str], *, n_indent: int = 0, limit_s: float = 0, times: Iterator[float]) -> str:
    limits = LineLimits(n_indent, limit_s, lambda: next(times))
    shown = []
    for piece in pieces:
        shown.append(limits.take(piece))
        if limits.ended:
            return "".join(shown)
    return "".join(shown) + limits.rest()


def still() -> Iterator[float]:
    while True:
        yield 0.0


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("n_indent", "text", "shown"),
    [
        (0, "a\nb\n", "a\nb\n"),
        (4, "x = 1\n    y = 2\nz", "x = 1\n    y = 2\n"),
        (4, "x = 1\n\t\t\t\ty = 2\n  z", "x = 1\n\t\t\t\ty = 2\n"),
        (2, "deep\n        deeper\n  back", "deep\n        deeper\n  back"),
        (1, "a block\n\nwhat follows", "a block\n"),
        (4, "cut off in\n  ", "cut off in\n  "),
        (4, "", ""),
    ],
)
def test_an_answer_ends_before_a_line_that_leaves_the_block(
    n_indent: int, text: str, shown: str
) -> None:
    assert cut([text], n_indent=n_indent, times=still()) == shown
    rng = random.Random(n_indent)
    for _ in range(50 if len(text) > 1 else 0):
        assert cut(pieces(text, rng), n_indent=n_indent, times=still()) == shown


def test_indentation_is_shown_only_once_its_line_goes_on() -> None:
    limits = LineLimits(4, 0)
    assert limits.take("a\n   ") == "a\n"
    assert limits.take(" ") == ""
    assert limits.take("b") == "    b"


def test_a_late_answer_ends_with_its_line() -> None:
    times = iter([0.0, 0.0, 0.5, 1.5, 1.6])
    texts = ["one\n", "two\nth", "ree", "\nfour\nfive"]
    assert cut(texts, limit_s=1, times=times) == "one\ntwo\nthree\n"
