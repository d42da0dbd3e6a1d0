"""Finds marks in text that arrives piece by piece."""

import re
from collections.abc import Sequence

# Three backticks with another one later on the line are code within the line.
_OPENING = re.compile(r" {0,3}(`{3,}(?=[^`]*\Z)|~{3,})")
_CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})\s*")


def held(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end of `text` that may begin a mark."""
    longest = max(map(len, marks), default=1) - 1
    begins = {mark[:1] for mark in marks}
    for n in range(min(longest, len(text)), 0, -1):
        if text[-n] in begins and any(mark.startswith(text[-n:]) for mark in marks):
            return n
    return 0


class CodeBlocks:
    """Follows the fenced code blocks of Markdown in text that arrives piece by piece."""

    def __init__(self) -> None:
        self._fence: str | None = None
        self._line: list[str] = []
        """The pieces of the last line."""

    def add(self, text: str) -> None:
        *lines, rest = text.split("\n")
        for end in lines:
            line, self._line = "".join([*self._line, end]), []
            if self._fence is None:
                found = _OPENING.match(line)
                self._fence = found and found[1]
            elif (found := _CLOSING.fullmatch(line)) and found[1].startswith(self._fence):
                self._fence = None
        if rest:
            self._line.append(rest)

    def is_code(self, blank: str) -> bool:
        """Whether the text, with blanks behind it, ends in a code block or behind a backtick."""
        end = CodeBlocks()
        end._fence, end._line = self._fence, [*self._line]
        end.add(blank)
        line = "".join(end._line)
        return bool(end._fence or line.endswith("`") or _OPENING.match(line))
