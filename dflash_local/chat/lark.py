"""Writes Lark grammars for llguidance, as far as tool calls need them.

The syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_local.chat.form import ID, PYTHON, Form, Marks
from dflash_local.chat.parsing.values import ALL_TYPES, json_types
from dflash_local.chat.tool import Tool
from dflash_local.sampling.json_schema import enforceable

IsToken = Callable[[str], bool]
"""Whether a text is the name of one control or user-defined token of the vocabulary."""

# A bound on the length of a text that a grammar counts.
_MAX_LENGTH = 100_000
# Any value like JSON with another quote, and keys without one.
_LOOSE = r"""loose: loosestring | loosenumber | looseboolean | loosenull | loosearray | looseobject
loosestring: QUOTE LOOSETEXT QUOTE
LOOSETEXT: /[^<]*/
looseinteger: loosenumber
loosenumber: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/
looseboolean: /true|false/
loosenull: /null/
loosearray: "[" (loose ("," loose)*)? "]"
looseobject: "{" (loosepair ("," loosepair)*)? "}"
loosepair: /[^:<>{}]{1,64}:/ loose"""
_AROUND = {None: ("", "", ""), PYTHON: ("", ", ", ")")}
# The layout of Python's json.dumps, which templates show the models. If white space were free,
# small models would write nothing else.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def text_rule(text: str, is_token: IsToken) -> str:
    """A text, in which the names of tokens are these tokens, and ids of calls are free."""
    parts, plain = [], ""
    # Other names have no syntax there. What is text comes in one literal: it is lexed as a whole.
    for piece in re.split(rf"(<[^<>\s]+>|{ID})", text):
        if piece == ID or (piece[:1] == "<" and is_token(piece)):
            parts += [literal(plain), "/[a-zA-Z0-9_-]{1,64}/" if piece == ID else piece]
            plain = ""
        else:
            plain += piece
    return " ".join(part for part in [*parts, literal(plain)] if part != literal(""))


def rules_up_to(mark: str, is_token: IsToken, name: str, repeat: str = "*") -> list[str]:
    """A rule `name` and what it needs: any character, repeated so often, and the first `mark`."""
    if is_token(mark.strip()):
        # No token can match within a terminal, so it ends before the mark by itself.
        terminal = name.upper()
        return [f"{name}: {terminal} {text_rule(mark, is_token)}", rf"{terminal}: /(.|\n){repeat}/"]
    plain = re.sub(r"([\\^$.|?*+()\[\]{}/])", r"\\\1", mark).replace("\n", "\\n")
    return [rf"{name}[lazy]: /(.|\n){repeat}{plain}/"]


def json_rule(name: str, schema: Any, *, lenient: bool = True) -> str:
    """A rule for JSON text of `schema`, in the layout that models are shown.

    `lenient` ignores the parts of the schema that llguidance does not know; without it, such a
    schema is refused: GrammarError. The tools of editors use formats and keywords that OpenAI
    ignores too.
    """
    bound = enforceable(schema, lenient=lenient)
    bound = {**bound, "x-guidance": {**_LAYOUT, "lenient": lenient}}
    return f"{name}: %json {json.dumps(bound)}"


def reasoning_rules(is_token: IsToken, marks: Marks, gap: str, *, is_open: bool) -> list[str]:
    """Rules `reasoning` and what it needs: an optional reasoning part, or the rest of one, and the
    text `gap` behind it, or some line breaks."""
    opening, closing = marks
    thought = f"thought {text_rule(gap, is_token) or 'GAP'}"
    begun = thought if is_open else f"({text_rule(opening, is_token)} {thought})?"
    gaps = [f"reasoning: {begun}", r"GAP: /\n{0,2}/"]
    return [*gaps, *rules_up_to(closing, is_token, "thought")]


def either(*grammars: str) -> str:
    """A grammar of the texts of all `grammars`."""
    names = [f"way{i}" for i in range(len(grammars))]
    rules = [f"{name}: %lark {{\n{text}\n}}" for name, text in zip(names, grammars, strict=True)]
    return "\n".join([f"start: {' | '.join(names)}", *rules])


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
        "call: " + " | ".join(f"call{i}" for i in range(len(tools))),
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
    given, required = tool.parameters.get("properties"), tool.parameters.get("required")
    opening, comma, close = _AROUND.get(form.quote, ("{", ",", "}"))
    rules: list[str] = []
    # `first` begins with this key or a later one, `more` goes on with it.
    more, first = literal(""), literal("")
    properties = [*given.items()] if isinstance(given, Mapping) else []
    for i, (key, schema) in reversed([*enumerate(properties)]):
        part, maybe = f"{name}x{i}", not (isinstance(required, list | tuple) and key in required)
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
        own = schema if isinstance(schema, Mapping) else {}  # true allows any value
        return json_rule(f"{name}json", {**shared, **own})

    kinds, texts = json_types(schema, root), _texts(schema)
    is_text = "string" in kinds
    if form.quote == PYTHON:
        text = r" | /'([^'\\\n]|\\.)*'/" * is_text
        return [f"{name}: {literal(f'{key}=')} ({name}json{text})", in_json()]
    if form.tags is None:
        quote = text_rule(form.quote or "", is_token)
        listed = [f"{quote} {literal(text)} {quote}" for text in texts]
        plain = [f"loose{kind}" for kind in sorted(kinds)]
        return [f"{name}: {literal(f'{key}:')} ({' | '.join(listed or plain)})"]
    values, closing = form.tags.values, form.tags.closing
    kind = "string" if is_text else min(kinds or ALL_TYPES)
    begin = values.get("", "") or values.get(kind) or values["string"]
    rules = [f"{name}: {text_rule(f'{form.tags.opening}{key}{begin}', is_token)} {name}value"]
    if is_text and not texts:
        return [*rules, *rules_up_to(closing, is_token, f"{name}value", _lengths(schema))]
    value = " | ".join(map(literal, texts)) if is_text else f"{name}json"
    rules.append(f"{name}value: ({value}) {text_rule(closing, is_token)}")
    return rules if is_text else [*rules, in_json()]


def _texts(schema: Any) -> list[str]:
    """The texts that a schema lists, if it lists any and nothing else."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return values
    return []


def _lengths(schema: Any) -> str:
    """The repetition of any character, as a regular expression writes it."""
    given = schema if isinstance(schema, Mapping) else {}
    low, high = (
        bound if isinstance(bound, int) and 0 <= bound <= _MAX_LENGTH else ""
        for bound in (given.get("minLength"), given.get("maxLength"))
    )
    return f"{{{low or 0},{high}}}"
