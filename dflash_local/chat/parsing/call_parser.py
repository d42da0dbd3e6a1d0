"""Reads a tool call, by the form of the model's calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from dflash_local.chat.form import CDATA, ID, PYTHON, Form, Tags, marks_of, shared_start
from dflash_local.chat.parsing.marks import held
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


class CallParser(Parser):
    """Reads one call of a tool, and tells its arguments as JSON.

    `tools` are those that may be called, by name. White space between marks may be missing, or be
    another.
    """

    def __init__(self, form: Form, tools: Mapping[str, Tool]) -> None:
        super().__init__()
        self._form = form
        self._tools = tools
        self._name = ""

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
        """Reads a text of the form."""
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
        """Reads the arguments of a call in Python. They come whole: only a complete call tells what
        they are."""
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
            rest = ""
            if len(starts) > 1:
                rest = yield from self._one_of([start[len(shared) :] for start in starts])
            start = starts[shared + rest]
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
        begun = re.compile(
            rf"{closed}({_any_of(mark[:n] for mark in follow for n in range(len(mark)))})\Z"
        )
        while not (found := whole.search(text)):
            maybe = begun.search(text)
            n = maybe.start() if maybe else len(text) - held(text, ends)
            give(text[:n])
            text = text[n:] + (yield from self._piece())
        give(text[: found.start()])
        self._at -= len(text) - found.end()
        return found[2]


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts))
