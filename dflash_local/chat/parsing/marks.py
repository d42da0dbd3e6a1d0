"""Finds marks in text that arrives piece by piece."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)


def find(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """The first of `marks` in `text`: its place, and which mark it is."""
    found = [(where, mark) for mark in marks if (where := text.find(mark)) >= 0]
    return min(found, key=lambda pair: (pair[0], -len(pair[1])), default=None)


def held(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        end = text[-n:]
        if any(mark.startswith(end) for mark in marks):
            return n
    return 0


def is_code(text: str) -> bool:
    """Whether a text ends inside a fenced code block of Markdown, or right behind a backtick."""
    fence = None
    *lines, rest = text.split("\n")
    for line in lines:
        found = _FENCE.fullmatch(line)
        if fence is None:
            fence = _opened(line)
        elif found and found[1].startswith(fence) and not found[2].strip():
            fence = None
    return fence is not None or text.endswith("`") or _opened(rest) is not None


def _opened(line: str) -> str | None:
    """The fence that a line begins a block with."""
    found = _FENCE.fullmatch(line)
    # Three backticks with another one later on the line are code within the line.
    if found is None or (found[1][0] == "`" and "`" in found[2]):
        return None
    return found[1]
