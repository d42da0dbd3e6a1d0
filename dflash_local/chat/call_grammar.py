"""Grammars of tool calls, from the form of the model's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_local.chat.form import PYTHON, Form
from dflash_local.chat.lark import IsToken, any_of, json_rule, literal, rules_up_to, text_rule
from dflash_local.chat.parsing.values import ALL_TYPES, json_types
from dflash_local.chat.tool import Tool

# A bound on the length of a text that a grammar counts.
_MAX_LENGTH = 100_000
# Any value like JSON with another quote, and keys without one.
_LOOSE = r"""loosetext: QUOTE LOOSETEXT QUOTE
LOOSETEXT: /[^<]*/
LOOSENUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/
LOOSEBOOL: /true|false/
LOOSENULL: /null/
loosevalue: loosetext | LOOSENUMBER | LOOSEBOOL | LOOSENULL | looselist | looseobject
looselist: "[" (loosevalue ("," loosevalue)*)? "]"
looseobject: "{" (loosepair ("," loosepair)*)? "}"
loosepair: LOOSEKEY loosevalue
LOOSEKEY: /[^:<>{}]{1,64}:/"""
_AROUND = {None: ("", "", ""), PYTHON: ("", ", ", ")")}
_LOOSE_NAMES = {
    "string": "loosetext",
    "boolean": "LOOSEBOOL",
    "null": "LOOSENULL",
    "array": "looselist",
    "object": "looseobject",
}


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
            rules += _argument_rules(form, tool, f"args{i}", is_token)
    if form.quote not in (None, PYTHON):
        rules.append(_LOOSE.replace("QUOTE", text(form.quote or "")))
    return rules


def _argument_rules(form: Form, tool: Tool, name: str, is_token: IsToken) -> list[str]:
    """Rules of one tool's arguments that are not in JSON."""
    required = tool.parameters.get("required") or ()
    opening, comma, close = _AROUND.get(form.quote, ("{", ",", "}"))
    rules: list[str] = []
    # `first` begins with this key or a later one, `more` goes on with it.
    more, first = literal(""), literal("")
    properties = [*(tool.parameters.get("properties") or {}).items()]
    for i, (key, schema) in reversed([*enumerate(properties)]):
        part, maybe = f"{name}x{i}", key not in required
        rules += [
            *_value_rules(form, part, key, schema, tool.parameters, is_token),
            f"{part}more: {more}",
            f"{part}first: {part} {part}more" + f" | {first}" * maybe,
        ]
        more = f"{literal(comma)} {part} {part}more" + f" | {part}more" * maybe
        first = f"{part}first"
    return [*rules, f"{name}: {literal(opening)} ({first}) {literal(close)}"]


def _value_rules(
    form: Form, name: str, key: str, schema: Any, root: Mapping[str, Any], is_token: IsToken
) -> list[str]:
    """Rules of one argument: its key and its value."""

    def in_json() -> str:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return json_rule(f"{name}json", {**shared, **schema})

    kinds, texts = json_types(schema, root), _texts(schema)
    is_text = "string" in kinds
    if form.quote == PYTHON:
        text = r" | /'([^'\\\n]|\\.)*'/" * is_text
        return [f"{name}: {literal(f'{key}=')} ({name}json{text})", in_json()]
    if form.tags is None:
        quote = text_rule(form.quote or "", is_token)
        listed = [f"{quote} {literal(text)} {quote}" for text in texts]
        plain = sorted({_LOOSE_NAMES.get(kind, "LOOSENUMBER") for kind in kinds})
        return [f"{name}: {literal(f'{key}:')} ({any_of(listed or plain)})"]
    values, closing = form.tags.values, form.tags.closing
    kind = "string" if is_text else min(kinds or ALL_TYPES)
    begin = values.get("", "") or values.get(kind) or values["string"]
    rules = [f"{name}: {text_rule(f'{form.tags.opening}{key}{begin}', is_token)} {name}value"]
    if is_text and not texts:
        return [*rules, *rules_up_to(closing, is_token, f"{name}value", _lengths(schema))]
    value = any_of([literal(text) for text in texts]) if is_text else f"{name}json"
    rules.append(f"{name}value: ({value}) {text_rule(closing, is_token)}")
    return rules if is_text else [*rules, in_json()]


def _texts(schema: Any) -> list[str]:
    """The texts that a schema lists, if it lists any and nothing else."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return []
    return values


def _lengths(schema: Any) -> str:
    """How often a text repeats any character, as a regular expression writes it."""
    given = schema if isinstance(schema, Mapping) else {}
    low, high = (
        bound if isinstance(bound, int) and 0 <= bound <= _MAX_LENGTH else ""
        for bound in (given.get("minLength"), given.get("maxLength"))
    )
    return f"{{{low or 0},{high}}}"
