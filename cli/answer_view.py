"""An answer in the terminal: drafted text tinted, Markdown and code by weight of the letters, lines
of prose broken between words. Code is left as it is: it may be copied.

The colour says who wrote the text, and nothing else. Letters are bold and slanted as Pygments'
style for black-and-white print has it: so code can be read on any background.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.styles import get_style_by_name
from pygments.util import ClassNotFound
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from dflash_local.origins import Origin, Origins
from dflash_local.printable import shown
from dflash_local.result import Piece

TINTS = {(True, False): "green", (True, True): "blue"}
"""The colours of a drafter's drafts and of copies, by `Origin`."""
_FENCE = re.compile(r" {0,3}(```+|~~~+) *([\w+#.-]*)")
_WORD = re.compile(r"[^\s\u2e80-\U0010ffff]*\Z")
"""The last word so far; in scripts without blanks, each sign is a word."""
_PARTS = re.compile(r"\n|[^\S\n]+|[^\s\u2e80-\U0010ffff]+|.")
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
        self._column = 0
        self._thought = ""  # the word of a thought that has not ended
        self._thought_kinds: list[Origin] = []

    def add(self, pieces: Iterable[Piece]) -> None:
        """The text that the model wrote next, in a chat with the marks of its format."""
        self._origins.add(pieces)

    def write(self, text: str, *, is_thought: bool = False) -> None:
        """Write what is complete of the text so far. A thought is dim."""
        kinds = self._origins.of(text)
        if is_thought:
            self._thought += shown(text)
            self._thought_kinds += kinds
            begin = _begin_of_word(self._thought)
            self._flush_thought(begin if len(self._thought) - begin <= _MOST_HELD else None)
            return
        self._flush_thought()
        for line in shown(text).splitlines(keepends=True):
            self._text += line
            self._kinds += kinds[: len(line)]
            del kinds[: len(line)]
            if line.endswith("\n"):
                self._end_line()
        begin = self._open_mark(_begin_of_word(self._text))
        self._flush(begin if len(self._text) - begin <= _MOST_HELD else len(self._text))

    def finish(self) -> None:
        self._flush_thought()
        self._flush(len(self._text))

    def end_thought(self) -> None:
        """Write the rest of a thought, and an empty line after it."""
        self._flush_thought()
        self._print(Text("\n\n", end=""), [])

    def _flush_thought(self, end: int | None = None) -> None:
        end = len(self._thought) if end is None else end
        if end:
            self._print(Text(self._thought[:end], style="dim", end=""), self._thought_kinds[:end])
            self._thought, self._thought_kinds = self._thought[end:], self._thought_kinds[end:]

    def _open_mark(self, end: int) -> int:
        """The place of a mark of Markdown that is not closed before `end`, or else `end`."""
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
        self._console.print(self._broken(text), end="", soft_wrap=True)

    def _broken(self, text: Text) -> Text:
        """With line breaks before words of prose that would cross the edge."""
        width, broken, begin = self._console.width, Text(end=""), 0
        for found in _PARTS.finditer(text.plain):
            part, n = found[0], cell_len(found[0])
            if part == "\n":
                self._column = 0
            elif self._column + n > width and not self._fence:
                broken.append_text(text[begin : found.start()])
                begin = found.end() if part.isspace() else found.start()
                if part.isspace():
                    self._column = width
                    continue
                if self._column:
                    broken.append("\n")
                self._column = n if n <= width else n % width
            else:
                self._column += n
        return broken.append_text(text[begin:])

    def _styles(self, text: str) -> Iterator[tuple[int, int, str]]:
        lexer = self._lexer or (None if self._fence else _lexer_of("markdown"))
        if lexer is None:
            return
        weights = get_style_by_name("bw")
        for begin, kind, value in lexer.get_tokens_unprocessed(text):
            found = weights.style_for_token(kind)
            style = " ".join(name for name in ("bold", "italic", "underline") if found[name])
            if style:
                yield begin, begin + len(value), style


def _begin_of_word(text: str) -> int:
    word = _WORD.search(text)
    return word.start() if word else len(text)


def _lexer_of(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None
