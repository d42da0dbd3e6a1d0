"""Reads a tool call, by the form of the model's calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from dflash_local.chat.form import CDATA, ID, PYTHON, Form, Tags, marks_of, shared_start
from dflash_local.chat.parsing.json_parser import MAX_DEPTH, JsonParser, Unexpected
from dflash_local.chat.parsing.marks import held
from dflash_local.chat.parsing.parser import Waiting
from dflash_local.chat.parsing.values import ALL_TYPES, json_types, python_arguments, typed
from dflash_local.chat.tool import Tool

_ID = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_BUILT_IN = ".call("
"""What Llama 3.1 writes between the name and the arguments of its built-in tools."""
# Of a call in Python: its compiler could take long over more.
_MOST_CHARACTERS = 20_000
_LONGEST_KEY = 1000
_ESCAPED = frozenset("\n\\'\"abfnrtvxuUN01234567")
_KNOWN_KEYS = ("type", "id")


class CallParser(JsonParser):
    """Reads one call of a tool, and tells its arguments as JSON.

    `tools` are those that may be called, by name. White space between marks may be missing, or be
    another.
    """

    def __init__(self, form: Form, tools: Mapping[str, Tool]) -> None:
        super().__init__()
        self._form = form
        self._tools = tools
        self._name = self._early = ""  # arguments before the name

    def _one_call(self, lead: str) -> Waiting[None]:
        """Reads a call behind a `lead`."""
        form = self._form
        self._name, self._early, self._is_certain = "", "", False
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
        elif form.quote:
            yield from self._expect("{")
            self._at -= 1
            yield from self._loose(form.quote)
        else:
            yield from self._arguments()

    def _literal(self, text: str) -> Waiting[None]:
        """Reads a text of the form."""
        for piece in re.findall(rf"{ID}|[^\s{ID}]+", text):
            if piece == ID:
                char = yield from self._solid()
                while char in _ID:
                    char = yield from self._next()
                self._at -= 1
                continue
            char = yield from self._solid()
            for i, expected in enumerate(piece):
                if char != expected:
                    raise Unexpected
                if i + 1 < len(piece):
                    char = yield from self._next()

    def _one_of(
        self, texts: Sequence[str] | Mapping[str, Tool], *, longest: bool = False
    ) -> Waiting[str]:
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

    # Arguments

    def _begin(self, text: str = "") -> None:
        """This is a call, as far as is known, with these arguments so far."""
        if self._name and not self._is_certain:
            self._is_certain = True
            self._start_call(self._name)
            text = self._early + text
        self._add_arguments(text)

    def _add_arguments(self, text: str) -> None:
        if self._is_certain:
            super()._add_arguments(text)
        else:
            self._early += text

    def _arguments(self) -> Waiting[None]:
        """Reads arguments in JSON, as they are written."""
        yield from self._expect("{")
        self._begin()
        yield from self._json()

    def _object(self, keys: tuple[str, str]) -> Waiting[None]:
        """Reads a JSON object with the keys of a name and of arguments, in any order."""
        form = self._form
        known = None if not form.is_bare else ("name", *keys, "arguments", *_KNOWN_KEYS)
        seen: set[str] = set()
        char = yield from self._solid()
        while char in "{," and (char == "{") == (not seen):
            yield from self._expect('"')
            key = yield from self._string(None if self._is_certain else known)
            is_arguments = key == keys[1] or (form.is_bare and key == "arguments")
            key = keys[1] if is_arguments else key
            if key in seen:
                raise Unexpected
            seen.add(key)
            yield from self._expect(":")
            if key == keys[0]:
                yield from self._expect('"')
                self._name = yield from self._string(self._tools)
                if keys[1] in seen:
                    self._begin()
            elif is_arguments:
                yield from self._arguments()
            else:
                yield from self._value((yield from self._solid()))
            char = yield from self._solid()
        if char != "}" or not self._name or (form.is_bare and keys[1] not in seen):
            raise Unexpected
        if keys[1] not in seen:
            self._begin("{}")

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

    def _loose(self, quote: str, depth: int = 0) -> Waiting[None]:
        """Reads a value like JSON, in which texts have another quote and keys have none."""
        char = yield from self._solid()
        if depth == MAX_DEPTH:
            raise Unexpected
        if char in "{[":
            self._begin(char)
            close, more = "}" if char == "{" else "]", ""
            char = yield from self._solid()
            while char != close:
                if more:
                    if char != ",":
                        raise Unexpected
                    char = yield from self._solid()
                self._add_arguments(more)
                self._at -= 1
                more = ", "
                if close == "}":
                    key = yield from self._until(":")
                    self._add_arguments(f"{json.dumps(key.strip(), ensure_ascii=False)}: ")
                yield from self._loose(quote, depth + 1)
                char = yield from self._solid()
            self._add_arguments(close)
        elif char == quote[0]:
            self._at -= 1
            yield from self._literal(quote)
            self._add_arguments('"')
            text = ""
            while (where := text.find(quote)) < 0:
                n = len(text) - held(text, (quote,))
                self._add_arguments(_escaped(text[:n]))
                text = text[n:] + (yield from self._piece())
            self._at -= len(text) - where - len(quote)
            self._add_arguments(_escaped(text[:where]) + '"')
        else:
            text = ""
            while char not in ",]}":
                text += char
                char = yield from self._next()
            self._at -= 1
            self._add_arguments(typed(text.strip(), ALL_TYPES - {"string"}))

    def _until(self, end: str) -> Waiting[str]:
        text = ""
        while not text.endswith(end):
            text += yield from self._next()
            if len(text) > _LONGEST_KEY or "\n" in text.strip():
                raise Unexpected
        return text.removesuffix(end)

    def _elements(self, tags: Tags) -> Waiting[None]:
        """Reads arguments that are one element each."""
        parameters = self._tools[self._name].parameters
        known = parameters.get("properties")
        opening, ends = tags.opening.strip(), marks_of(self._form.end)
        # The closing mark of the call stands in for a forgotten one of its arguments.
        follow = (opening, *ends, *marks_of(self._form.tail))
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
                is_text = tags.values.get("string") == start
                types = frozenset({"string"}) if is_text else (types or ALL_TYPES) - {"string"}
            self._begin(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if types == {"string"}:
                self._add_arguments('"')
                mark = yield from self._element(
                    tags, start, follow, lambda text: self._add_arguments(_escaped(text))
                )
                self._add_arguments('"')
            else:
                kept: list[str] = []
                mark = yield from self._element(tags, start, follow, kept.append)
                self._add_arguments(typed("".join(kept), types))
        self._begin("{}" if separator == "{" else "}")

    def _element(
        self, tags: Tags, start: str, follow: Sequence[str], give: Callable[[str], None]
    ) -> Waiting[str]:
        """Gives the text of a value as far as it is certain, and returns the mark behind it.

        What looks like its end belongs to it where something else follows, as in a text about this
        very markup."""
        gap = start[len(start.rstrip()) :]
        end = tags.closing.strip()
        before = tags.closing[: tags.closing.index(end)]
        text, begun = "", False
        while True:
            text += yield from self._piece()
            if not begun:
                if text != gap and gap.startswith(text):
                    continue
                inner = text.removeprefix(gap)
                if tags.cdata and inner != CDATA and CDATA.startswith(inner):
                    continue
                text, begun = inner, True
                if tags.cdata and inner.startswith(CDATA):
                    text, before, end = inner.removeprefix(CDATA), "", f"]]>{end}"
            while (where := text.find(end)) >= 0:
                rest = text[where + len(end) :].lstrip()
                certain = text[:where].removesuffix(before)
                if marks := [mark for mark in follow if rest.startswith(mark)]:
                    give(certain)
                    mark = min(marks, key=len)
                    self._at -= len(rest) - len(mark)
                    return mark
                if any(mark.startswith(rest) for mark in follow):
                    give(certain)
                    text = text[len(certain) :]
                    break
                give(text[: where + len(end)])
                text = text[where + len(end) :]
            if where < 0:
                n = len(text) - held(text, (before + end, end))
                give(text[:n])
                text = text[n:]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
