"""Parses reasoning, then content with tool calls in it, by the form of the model's calls."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_local.chat.events import Content, Reasoning
from dflash_local.chat.form import Form, Marks, marks_of
from dflash_local.chat.parsing.call_parser import CallParser
from dflash_local.chat.parsing.marks import CodeBlocks
from dflash_local.chat.parsing.parser import Waiting
from dflash_local.chat.tool import Tool


class AnswerParser(CallParser):
    """Parses what may be reasoned between the marks `thinking`, of which the prompt may have the
    first (`is_open`), and content with calls of `tools`, by name, where there is a `form`.

    White space around reasoning and calls belongs to the format and is left out. Calls without a
    mark, as Llama 3.1's, are such only at the beginning of an answer, perhaps behind a `tag`, and
    behind each other. `silent` marks around content are left out.
    """

    def __init__(
        self,
        form: Form | None,
        tools: Mapping[str, Tool],
        thinking: Marks | None = None,
        *,
        is_open: bool = False,
        tag: str = "",
        silent: tuple[str, ...] = (),
    ) -> None:
        super().__init__(form or Form(), tools)
        self._reads_calls = form is not None
        self._thinking = thinking
        self._is_open = is_open
        self._silent = silent
        form = self._form
        self._openings = form.openings
        self._marks = (*self._openings, *silent)
        self._again = next(iter(marks_of(form.again)), "")
        self._lead = form.again.partition(self._again)[2] if self._again else ""
        self._tags = (tag,) if tag else ()
        ends = form.closings | ({";", tag} if form.is_bare else set())
        self._between = [mark for mark in (self._again, *ends) if mark]
        self._shown = True
        """Whether content was shown since the last call, or no call was made."""
        self._said = CodeBlocks()
        """Those of the content since the last call."""

    def _parse(self) -> Waiting[None]:
        if self._thinking:
            yield from self._reason(*self._thinking)
        if self._reads_calls and self._form.is_bare:
            tag = yield from self._mark(self._tags)
            yield from self._calls(len(tag), "")
        yield from self._content()
        if self._shown:
            self._events.append(Content(self._take(0)))

    def _reason(self, opening: str, closing: str) -> Waiting[None]:
        if not self._is_open:
            if not (yield from self._mark((opening,))):
                return
            self._take(len(opening))
        yield from self._skip_blanks()
        close = yield from self._up_to(
            (closing,), lambda n: self._events.append(Reasoning(self._without_blank(n)))
        )
        rest = self._take(len(close))
        if not close:
            self._events.append(Reasoning(rest))
        yield from self._skip_blanks()

    def _content(self) -> Waiting[None]:
        """Shows text up to calls, and reads these."""
        while mark := (yield from self._up_to(self._marks, self._show)):
            if mark in self._silent:
                self._text = self._text.removeprefix(mark)
            elif self._said.is_code("".join(self._blank)):
                self._show(1)
            else:
                yield from self._calls(len(mark), self._openings[mark])

    def _show(self, n: int) -> None:
        """Make the next `n` characters content."""
        text = self._without_blank(n) if self._reads_calls else self._take(n)
        self._said.add(text)
        self._shown = self._shown or bool(text)
        self._events.append(Content(text))

    def _without_blank(self, n: int) -> str:
        """The next `n` characters; white space waits for what follows it."""
        solid = len(self._text[:n].rstrip())
        shown = self._take(solid) if solid else ""
        self._set_aside(n - solid)
        return shown

    def _skip_blanks(self) -> Waiting[None]:
        self._text = self._text.lstrip()
        while not self._text and not self._last:
            yield
            self._text = self._text.lstrip()

    def _calls(self, at: int, lead: str) -> Waiting[None]:
        """Reads calls, one behind the other: where in the text the first one begins, and what comes
        before it there."""
        while True:
            self._at = at
            is_done = yield from self._tried(self._one_call(lead))
            if at and not self._is_certain:  # it only looked like a call; another one may follow
                self._show(1)
            if not is_done:
                return
            # What belongs to the calls is left out, up to where the next one may begin.
            while True:
                mark = yield from self._mark(self._between)
                if mark == self._again or not mark:
                    break
                self._take(len(mark))
            at, lead = len(mark), self._lead if mark else ""
            if not mark and (self._again or not self._text):
                self._take(0)
                return

    def _start_call(self, name: str) -> None:
        self._said, self._shown = CodeBlocks(), False
        super()._start_call(name)
