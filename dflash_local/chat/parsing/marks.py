"""Finds marks in text that arrives piece by piece."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)
# More of a line than this is not needed to tell whether it is a fence.
_MAX_LINE = 200


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


class Fences:
    """Tells whether text is inside a fenced code block of Markdown, or right behind a backtick."""

    def __init__(self) -> None:
        self._fence = ""
        self._line = ""
        self._last = ""

    def read(self, text: str) -> None:
        if text:
            self._last = text[-1]
        *lines, rest = text.split("\n")
        for line in lines:
            self._end_line((self._line + line)[:_MAX_LINE])
            self._line = ""
        self._line = (self._line + rest)[:_MAX_LINE]

    @property
    def inside(self) -> bool:
        return bool(self._fence) or self._last == "`" or self._opening(self._line) is not None

    def _end_line(self, line: str) -> None:
        if not self._fence:
            self._fence = self._opening(line) or ""
            return
        found = _FENCE.fullmatch(line)
        if found and found[1].startswith(self._fence) and not found[2].strip():
            self._fence = ""

    @staticmethod
    def _opening(line: str) -> str | None:
        found = _FENCE.fullmatch(line)
        # Three backticks with another one later on the line are code within the line.
        if found is None or (found[1][0] == "`" and "`" in found[2]):
            return None
        return found[1]
