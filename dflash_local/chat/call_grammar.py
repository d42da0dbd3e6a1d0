"""Grammars of tool calls, from the form of the model's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_local.chat.form import PYTHON, Form, Tags
from dflash_local.chat.lark import IsToken, any_of, json_rule, literal, pattern, text_rule
from dflash_local.chat.parsing.values import ALL_TYPES, json_types
from dflash_local.chat.tool import Tool

# A bound on the length of a text that a grammar counts.
_MAX_LENGTH = 100_000


def call_rules(
    form: Form, tools: Sequence[Tool], is_token: IsToken, *, parallel: bool
) -> list[str]:
    """Lark rules: `calls` and those that it needs.

    Of arguments that are not in JSON, bounds on texts other than their length and a list of values
    are not enforced, nor those on what is in lists and objects.
    """

    def text(*parts: str) -> str:
        return text_rule("".join(parts), is_token)

    more = f" ({text(form.between)} call)*" if parallel and form.between else ""
    rules = [
        f"calls: {text(form.head.lstrip())} call{more} {text(form.tail.rstrip())}",
        f"call: {any_of([f'call{i}' for i in range(len(tools))])}",
    ]
    for i, tool in enumerate(tools):
        begin = text(form.begin, tool.name, form.middle)
        rules.append(f"call{i}: {begin} args{i} {text(form.end)}")
        if form.tags is None and form.quote is None:
            rules.append(json_rule(f"args{i}", tool.parameters))
        else:
            rules += _Arguments(form, tool, f"args{i}", is_token).rules
    if form.quote not in (None, PYTHON):
        rules += _loose_rules(form.quote or "", is_token)
    return rules


class _Arguments:
    """The `rules` of one tool's arguments, where these are not in JSON."""

    def __init__(self, form: Form, tool: Tool, name: str, is_token: IsToken) -> None:
        self._form, self._root, self._is_token = form, tool.parameters, is_token
        properties = tool.parameters.get("properties") or {}
        required = tool.parameters.get("required") or ()
        self.rules: list[str] = []
        names = [f"{name}x{k}" for k in range(len(properties))]
        for part, (key, schema) in zip(names, properties.items(), strict=True):
            if form.tags:
                self._element(form.tags, part, key, schema)
            else:
                self._pair(part, key, schema)
        is_optional = [key not in required for key in properties]
        if form.tags:
            parts = [n + "?" * maybe for n, maybe in zip(names, is_optional, strict=True)]
            self.rules.append(f"{name}: {' '.join(parts) or literal('')}")
            return
        # `first` begins with this key or a later one, `more` goes on with it.
        more, first = literal(""), literal("")
        for part, maybe in reversed(list(zip(names, is_optional, strict=True))):
            begun = f"{part} {part}more"
            self.rules.append(f"{part}more: {more}")
            self.rules.append(f"{part}first: {begun}" + f" | {first}" * maybe)
            comma = literal(", " if form.quote == PYTHON else ",")
            more = f"{comma} {begun}" + f" | {part}more" * maybe
            first = f"{part}first"
        opening, close = ("", ")") if form.quote == PYTHON else ("{", "}")
        self.rules.append(f"{name}: {literal(opening)} ({first}) {literal(close)}")

    def _pair(self, name: str, key: str, schema: Any) -> None:
        if self._form.quote == PYTHON:
            text = r" | /'([^'\\\n]|\\.)*'/" * ("string" in json_types(schema, self._root))
            self.rules.append(f"{name}: {literal(f'{key}=')} ({name}value{text})")
            self.rules.append(self._json(f"{name}value", schema))
            return
        kinds = json_types(schema, self._root)
        texts = _texts(schema)
        quote = text_rule(self._form.quote or "", self._is_token)
        listed = [f"{quote} {literal(text)} {quote}" for text in texts]
        words = {
            "string": "loosetext",
            "boolean": "LOOSEBOOL",
            "null": "LOOSENULL",
            "array": "looselist",
            "object": "looseobject",
        }
        plain = sorted({words.get(kind, "LOOSENUMBER") for kind in kinds})
        self.rules.append(f"{name}: {literal(f'{key}:')} ({any_of(listed or plain)})")

    def _json(self, name: str, schema: Any) -> str:
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return json_rule(name, {**shared, **schema})

    def _element(self, tags: Tags, name: str, key: str, schema: Any) -> None:
        kinds = json_types(schema, self._root)
        is_text = "string" in kinds
        kind = "string" if is_text else min(kinds or ALL_TYPES)
        begin = tags.values.get("", "") or tags.values.get(kind) or tags.values["string"]
        begin = text_rule(f"{tags.opening}{key}{begin}", self._is_token)
        closing = text_rule(tags.closing, self._is_token)
        value, texts = f"{name}value", _texts(schema)
        self.rules.append(f"{name}: {begin} {value}")
        low, high = _lengths(schema)
        if not is_text:
            self.rules += [f"{value}: {name}json {closing}", self._json(f"{name}json", schema)]
        elif texts:
            self.rules.append(f"{value}: ({any_of([literal(text) for text in texts])}) {closing}")
        elif self._is_token(tags.closing.strip()):
            # No token can match within a terminal, so it ends before the mark by itself.
            terminal = f"TEXT{name.upper()}"
            self.rules += [
                f"{value}: {terminal} {closing}",
                rf"{terminal}: /(.|\n){{{low},{high}}}/",
            ]
        else:
            self.rules.append(rf"{value}[lazy]: /(.|\n){{{low},{high}}}{pattern(tags.closing)}/")


def _loose_rules(quote: str, is_token: IsToken) -> list[str]:
    """Rules for any value like JSON with another quote, and keys without one."""
    mark = text_rule(quote, is_token)
    return [
        f"loosetext: {mark} LOOSETEXT {mark}",
        r"LOOSETEXT: /[^<]*/",
        r"LOOSENUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
        "LOOSEBOOL: /true|false/",
        "LOOSENULL: /null/",
        "loosevalue: loosetext | LOOSENUMBER | LOOSEBOOL | LOOSENULL | looselist | looseobject",
        'looselist: "[" (loosevalue ("," loosevalue)*)? "]"',
        'looseobject: "{" (loosepair ("," loosepair)*)? "}"',
        "loosepair: LOOSEKEY loosevalue",
        "LOOSEKEY: /[^:<>{}]{1,64}:/",
    ]


def _texts(schema: Any) -> list[str]:
    """The texts that a schema lists, if it lists any and nothing else."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return []
    return values


def _lengths(schema: Any) -> tuple[int, int | str]:
    """Fewest and most characters of a text, as a regular expression writes them."""
    if not isinstance(schema, Mapping):
        return 0, ""
    low, high = schema.get("minLength"), schema.get("maxLength")
    return (
        low if isinstance(low, int) and 0 <= low <= _MAX_LENGTH else 0,
        high if isinstance(high, int) and 0 <= high <= _MAX_LENGTH else "",
    )
