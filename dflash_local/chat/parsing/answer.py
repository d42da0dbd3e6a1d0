"""Parses reasoning, then content with tool calls in it, by the form of the model's calls."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from dflash_local.chat.events import Content, Reasoning
from dflash_local.chat.form import CDATA, ID, PYTHON, Form, Marks, Tags, marks_of, shared_start
from dflash_local.chat.parsing.marks import CodeBlocks
from dflash_local.chat.parsing.parser import Parser, Unexpected, Waiting, escaped
from dflash_local.chat.parsing.values import ALL_TYPES, json_types, python_arguments, typed
from dflash_local.chat.tool import Tool

_ID = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_BUILT_IN = ".call("
"""What Llama 3.1 writes between the name and the arguments of its built-in tools."""
# Of a call in Python: its compiler could take long over more.
_MOST_CHARACTERS = 20_000
_ESCAPED = frozenset("\n\\'\"abfnrtvxuUN01234567")
_KNOWN_KEYS = ("type", "id")


class AnswerParser(Parser):
    """Parses what may be reasoned between the marks `thinking`, of which the prompt may have the
    first (`is_open`), and content with calls of `tools`, by name, where there is a `form`.

    White space around reasoning and calls belongs to the format and is left out. Calls without a
    mark, as Llama 3.1's, are such only at the beginning of an answer, perhaps behind a `tag`, and
    behind each other. `silent` marks around content are left out. Between marks of calls, white
    space may be missing or be another.
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
        super().__init__()
        self._reads_calls = form is not None
        self._form = form = form or Form()
        self._tools = tools
        self._thinking = thinking
        self._is_open = is_open
        self._silent = silent
        self._name = ""
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
        """Reads calls in a row; the first one begins `at` in the text, with a `lead`."""
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

    def _one_call(self, lead: str) -> Waiting[None]:
        """Reads a call behind a `lead`."""
        form = self._form
        self._name, self._is_certain = "", False
        yield from self._literal(lead)
        char = yield from self._solid()
        self._at -= 1
        if form.keys and (char == "{" or not form.is_bare):
            yield from self._object(form.keys)
            return
        self._name = yield from self._one_of(self._tools, longest=True)
        yield from self._literal(_BUILT_IN if form.keys else form.middle)
        if form.tags:
            yield from self._elements(form.tags)
        elif form.keys or form.quote == PYTHON:
            yield from self._python()
        else:
            yield from self._arguments(form.quote or "")

    def _literal(self, text: str) -> Waiting[None]:
        for piece in re.findall(rf"{ID}|[^\s{ID}]+", text):
            yield from self._solid()
            self._at -= 1
            if piece == ID:
                while (yield from self._next()) in _ID:
                    pass
                self._at -= 1
                continue
            for expected in piece:
                if (yield from self._next()) != expected:
                    raise Unexpected

    def _one_of(self, texts: Iterable[str], *, longest: bool = False) -> Waiting[str]:
        """Reads one of some texts. If one may begin with another, the `longest` one is meant."""
        read, char = "", (yield from self._solid())
        while any(text.startswith(read + char) for text in texts):
            read += char
            if read in texts and not longest:
                return read
            char = yield from self._next()
        if read not in texts:
            raise Unexpected
        self._at -= 1
        return read

    def _begin(self, text: str = "") -> None:
        """This is a call, as far as is known, with these arguments so far."""
        if not self._is_certain:
            self._is_certain = True
            self._start_call(self._name)
        self._add_arguments(text)

    def _arguments(self, quote: str = "") -> Waiting[None]:
        """Reads an object: in JSON, as it is written, or with another `quote`."""
        yield from self._expect("{")
        if self._name:
            self._begin()
        if quote:
            yield from self._value("{", quote)
        else:
            self._at -= 1
            yield from self._json()

    def _object(self, keys: tuple[str, str]) -> Waiting[None]:
        """Reads a JSON object with the keys of a name and of arguments, in any order."""
        is_bare = self._form.is_bare
        known = ("name", *keys, "arguments", *_KNOWN_KEYS) if is_bare else None
        seen: set[str] = set()
        early = "{}"  # arguments before the name
        char = yield from self._solid()
        while char in "{," and (char == "{") == (not seen):
            yield from self._expect('"')
            key = yield from self._string(None if self._is_certain else known)
            if is_bare and key == "arguments":
                key = keys[1]
            if key in seen:
                raise Unexpected
            seen.add(key)
            yield from self._expect(":")
            if key == keys[0]:
                yield from self._expect('"')
                self._name = yield from self._string(self._tools)
                if keys[1] in seen:
                    self._begin(early)
            elif key == keys[1]:
                begin = self._at
                yield from self._arguments()
                early = self._text[begin : self._at].lstrip()
            else:
                yield from self._value((yield from self._solid()))
            char = yield from self._solid()
        if char != "}" or not self._name or (is_bare and keys[1] not in seen):
            raise Unexpected
        if keys[1] not in seen:
            self._begin(early)

    def _python(self) -> Waiting[None]:
        """Reads the arguments of a call in Python, which are only known when all have come."""
        text, quote, depth = "", "", 1
        while depth:
            char = yield from self._next()
            text += "\\n" if quote and char == "\n" else char
            if quote:
                if char == "\\":
                    char = yield from self._next()
                    # Python warns of escapes that it does not know.
                    text += char if char in _ESCAPED else f"\\{char}"
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            else:
                depth += (char in "([{") - (char in ")]}")
            if len(text) > _MOST_CHARACTERS:
                raise Unexpected
        arguments = python_arguments(text[:-1])
        if arguments is None:
            raise Unexpected
        self._begin(arguments)

    def _elements(self, tags: Tags) -> Waiting[None]:
        """Reads arguments that are one element each."""
        parameters = self._tools[self._name].parameters
        known = parameters.get("properties")
        opening = tags.opening.strip()
        # The closing mark of the call stands in for a forgotten one of its arguments.
        follow = (opening, *marks_of(self._form.end), *marks_of(self._form.tail))
        starts = {text.rstrip(): text for text in tags.values.values()}
        shared = shared_start(*starts)
        key_end = marks_of(shared)[0]
        separator = "{"
        mark = yield from self._one_of(follow)
        while mark == opening:
            key = yield from self._until(key_end)
            if not key or key[0] in "<\n":
                raise Unexpected
            yield from self._literal(shared.removeprefix(key_end))
            rests = [start[len(shared) :] for start in starts]
            start = starts[shared + ((yield from self._one_of(rests)) if len(rests) > 1 else "")]
            schema = known.get(key, {"type": "string"}) if isinstance(known, Mapping) else {}
            types = json_types(schema, parameters)
            if "" not in tags.values:
                others = (types or ALL_TYPES) - {"string"}
                types = frozenset({"string"}) if tags.values.get("string") == start else others
            is_text, kept = types == {"string"}, list[str]()
            self._begin(f'{separator}"{escaped(key)}": ' + '"' * is_text)
            separator = ", "
            give = self._add_text if is_text else kept.append
            mark = yield from self._element(tags, start, follow, give)
            self._add_arguments('"' if is_text else typed("".join(kept), types))
        self._begin("{}" if separator == "{" else "}")

    def _element(
        self, tags: Tags, start: str, follow: Sequence[str], give: Callable[[str], None]
    ) -> Waiting[str]:
        """Gives the text of a value as far as it is certain, and returns the mark behind it.

        What looks like its end belongs to it where something else follows, as in a text about this
        very markup."""
        gap = start[len(start.rstrip()) :]
        heads = (gap, CDATA, gap + CDATA) if tags.cdata else (gap,)
        text = ""
        while any(text != head and head.startswith(text) for head in heads):
            text += yield from self._piece()
        text = text.removeprefix(gap)
        end = tags.closing.strip()
        ends = [tags.closing[: tags.closing.index(end)] + end, end]
        if tags.cdata and text.startswith(CDATA):
            text, ends = text.removeprefix(CDATA), [f"]]>{end}"]
        closed = rf"({_any_of(ends)})\s*"
        whole = re.compile(f"{closed}({_any_of(sorted(follow, key=len))})")
        begun = re.compile(rf"({closed}({_begun(follow)})?|{_begun(ends)})\Z")
        while not (found := whole.search(text)):
            maybe = begun.search(text)
            n = maybe.start() if maybe else len(text)
            give(text[:n])
            text = text[n:] + (yield from self._piece())
        give(text[: found.start()])
        self._at -= len(text) - found.end()
        return found[2]


def _begun(texts: Iterable[str]) -> str:
    return _any_of(text[:n] for text in texts for n in range(1, len(text)))


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts))
