"""An answer in the terminal: drafted text tinted, Markdown and code by weight of the letters.

The colour says who wrote the text, and nothing else. Letters are bold and slanted as Pygments'
style for black-and-white print has it: so code can be read on any background.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from dflash_local.chat.origins import Origin, Origins
from dflash_local.printable import shown

if TYPE_CHECKING:
    from pygments.lexer import Lexer
    from rich.console import Console

    from dflash_local.result import Piece

TINTS = {(True, False): "green", (True, True): "blue"}
"""The colours of a drafter's drafts and of copies, by `Origin`."""
_FENCE = re.compile(r" {0,3}(```+|~~~+) *([\w+#.-]*)")
_MOST_HELD = 40
"""The most characters of a word, or of words in bold, that wait for their end. Only then is their
style known: `de` is no keyword yet."""


class AnswerView:
    """Writes an answer as it comes, word by word."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._origins = Origins()
        self._text = ""  # since the line, or the block of code, began
        self._kinds: list[Origin] = []  # of its characters
        self._n_written = 0
        self._fence = ""  # what opened the block of code
        self._lexer: Lexer | None = None

    def add(self, pieces: Iterable[Piece]) -> None:
        """What the model wrote next, in a chat with the marks of its format."""
        self._origins.add(pieces)

    def write(self, text: str, *, is_thought: bool = False) -> None:
        """Write what is complete of the text so far. A thought is dim, and comes at once."""
        kinds = self._origins.of(text)
        if is_thought:
            self._print(Text(shown(text), style="dim", end=""), kinds)
            return
        for line in shown(text).splitlines(keepends=True):
            self._text += line
            self._kinds += kinds[: len(line)]
            del kinds[: len(line)]
            if line.endswith("\n"):
                self._end_line()
        word = re.search(r"[!-~]*\Z", self._text)
        begin = self._open_mark(word.start() if word else len(self._text))
        self._flush(begin if len(self._text) - begin <= _MOST_HELD else len(self._text))

    def finish(self) -> None:
        """Write the rest."""
        self._flush(len(self._text))

    def _open_mark(self, end: int) -> int:
        """Where a mark of Markdown stands that is not closed before `end`, or else `end`."""
        for mark in () if self._fence else ("**", "`"):
            if self._text.count(mark, 0, end) % 2:
                return self._text.rfind(mark, 0, end)
        return end

    def _end_line(self) -> None:
        self._flush(len(self._text))
        line = self._text[self._text.rfind("\n", 0, -1) + 1 :]
        mark = _FENCE.match(line)
        if self._fence and not (mark and mark[1].startswith(self._fence) and not mark[2]):
            return  # a block of code is read as a whole
        if mark:
            self._fence = "" if self._fence else mark[1]
            self._lexer = _lexer_of(mark[2]) if self._fence else None
        self._text, self._kinds, self._n_written = "", [], 0

    def _flush(self, end: int) -> None:
        if end <= self._n_written:
            return
        text = Text(self._text[:end], end="")
        for begin, stop, style in self._styles(self._text[:end]):
            text.stylize(style, begin, stop)
        self._print(text[self._n_written :], self._kinds[self._n_written : end])
        self._n_written = end

    def _print(self, text: Text, kinds: Sequence[Origin]) -> None:
        for kind, run in groupby(range(len(kinds)), kinds.__getitem__):
            if kind in TINTS:
                characters = list(run)
                text.stylize(TINTS[kind], characters[0], characters[-1] + 1)
        self._console.print(text, end="", soft_wrap=True)

    def _styles(self, text: str) -> Iterator[tuple[int, int, str]]:
        from pygments.styles import get_style_by_name

        lexer = self._lexer or (None if self._fence else _lexer_of("markdown"))
        if lexer is None:
            return
        weights = get_style_by_name("bw")
        for begin, kind, value in lexer.get_tokens_unprocessed(text):
            found = weights.style_for_token(kind)
            style = " ".join(name for name in ("bold", "italic", "underline") if found[name])
            if style:
                yield begin, begin + len(value), style


def _lexer_of(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None
