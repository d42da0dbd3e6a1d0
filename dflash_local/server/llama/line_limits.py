"""Where an answer in an editor ends, beside its stop texts: between two lines, as llama-server has
it."""

from __future__ import annotations

import time
from collections.abc import Callable


class LineLimits:
    """Cuts an answer before a line that is indented too little, and after one that ends too late.

    `n_indent`: blanks and tabs that every line but the first begins with, 0 for any; an empty line
    has none. `limit_s`: seconds since the first text after which the next line break is the last
    one, 0 for no end. What is shown is never taken back.
    """

    def __init__(
        self, n_indent: int, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._n_indent = n_indent
        self._limit_s = limit_s
        self._clock = clock
        self._began: float | None = None
        self._held = ""
        self._indenting = False
        self.ended = False

    def take(self, text: str) -> str:
        """What of the answer can be shown now; indentation is held until its line goes on."""
        if self._began is None:
            self._began = self._clock()
        late = self._limit_s > 0 and self._clock() - self._began > self._limit_s
        left, shown = self._held + text, ""
        while left and not self.ended:
            line, newline, rest = left.partition("\n")
            if self._indenting:
                body = line.lstrip(" \t")
                if not body and not newline:
                    break
                self.ended = len(line) - len(body) < self._n_indent
                if self.ended:
                    break
            shown += line + newline
            left = rest
            self._indenting = bool(newline) and self._n_indent > 0
            self.ended = bool(newline) and late
        self._held = "" if self.ended else left
        return shown

    def rest(self) -> str:
        """What was held back, when no more text is to come."""
        held, self._held = self._held, ""
        return held
