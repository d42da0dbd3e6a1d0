"""Qwen3-Coder's way: calls in a markup of functions and parameters. Qwen3.5 reasons as well.

Formats: the chat templates of Qwen3-Coder and Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.events import NewId
from dflash_local.chat.hermes import CLOSE, OPEN
from dflash_local.chat.lark import any_of, json_rule, literal, mark
from dflash_local.chat.markup_call import FUNCTION, PARAMETER, MarkupCall
from dflash_local.chat.plain import Plain
from dflash_local.chat.schema_types import json_types
from dflash_local.chat.tagged_calls import TaggedCalls
from dflash_local.chat.tool import Tool, chosen

_MAX_LENGTH = 100_000


@dataclass(frozen=True)
class QwenCoder(Plain):
    """`thinking`: the model may reason between `<think>` and `</think>` first.

    In grammars, bounds on texts other than their length and a list of values are not enforced.
    """

    name: str = "qwen-coder"

    def _reader(self, tools: Sequence[Tool], new_id: NewId) -> Parser:
        named = {tool.name: tool for tool in tools}
        # Models of this family now and then forget the outer mark.
        openings = {OPEN: False, FUNCTION: True}
        return TaggedCalls(openings, CLOSE, lambda: MarkupCall(named), new_id)

    def _call_rules(self, tools: Sequence[Tool], choice: str, is_token: IsToken) -> list[str]:
        called = chosen(tools, choice)
        rules = [
            f"call: {mark(OPEN, is_token)} {literal(chr(10))} function {mark(CLOSE, is_token)}",
            f"function: {any_of([f'function{i}' for i in range(len(called))])}",
        ]
        for i, tool in enumerate(called):
            rules += _function_rules(i, tool)
        return rules


def _function_rules(i: int, tool: Tool) -> list[str]:
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required") or ()
    parts, rules = [], []
    for k, (key, schema) in enumerate((properties or {}).items()):
        parts.append(f"parameter{i}x{k}{'' if key in required else '?'}")
        begin = literal(f"{PARAMETER}{key}>\n")
        rules.append(f"parameter{i}x{k}: {begin} value{i}x{k}")
        rules += _value_rules(f"value{i}x{k}", schema, tool.parameters)
    body = " ".join([literal(f"{FUNCTION}{tool.name}>\n"), *parts, literal("</function>\n")])
    return [f"function{i}: {body}", *rules]


def _value_rules(name: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """A parameter's value and its end."""
    end = literal("\n</parameter>\n")
    if "string" not in json_types(schema, root):
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return [f"{name}: json_{name} {end}", json_rule(f"json_{name}", {**shared, **schema})]
    texts = _texts(schema)
    if texts:
        return [f"{name}: ({any_of([literal(text) for text in texts])}) {end}"]
    low, high = _lengths(schema)
    return [rf"{name}[lazy]: /(.|\n){{{low},{high}}}\n<\/parameter>\n/"]


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
