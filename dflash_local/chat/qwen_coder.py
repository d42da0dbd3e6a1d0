"""Qwen3-Coder's way: calls in a markup of functions and parameters. Qwen3.5 reasons as well.

Formats: the chat templates of Qwen3-Coder and Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.events import NewId, call_id
from dflash_local.chat.lark import any_of, json_rule, literal, mark
from dflash_local.chat.markup_call import FUNCTION, PARAMETER, MarkupCall
from dflash_local.chat.schema_types import json_types
from dflash_local.chat.tagged_calls import TaggedCalls
from dflash_local.chat.thinking import Answer, Thinking, bound_answer, thinking_rules
from dflash_local.chat.tool import Tool, chosen

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MAX_LENGTH = 100_000


@dataclass(frozen=True)
class QwenCoder:
    """`thinking`: the model may reason between `<think>` and `</think>` first."""

    thinking: bool = False
    name: str = "qwen-coder"
    special: bool = False
    stop: tuple[str, ...] = ()

    def parser(
        self, tools: Sequence[Tool], *, thinking_open: bool = False, new_id: NewId = call_id
    ) -> Parser:
        named = {tool.name: tool for tool in tools}
        # Models of this family now and then forget the outer mark.
        openings = {OPEN: False, FUNCTION: True}
        answer: Parser = (
            TaggedCalls(openings, CLOSE, lambda: MarkupCall(named), new_id) if tools else Answer()
        )
        return Thinking(answer, is_open=thinking_open) if self.thinking else answer

    def call_grammar(
        self,
        tools: Sequence[Tool],
        *,
        choice: str,
        parallel: bool,
        is_token: IsToken,
        thinking_open: bool = False,
    ) -> str:
        """Bounds on texts other than their length and a list of values are not enforced."""
        called = chosen(tools, choice)
        more = ' ("\\n" call)*' if parallel else ""
        rules = [
            f"start: {'reasoning ' if self.thinking else ''}call{more}",
            f"call: {mark(OPEN, is_token)} {literal(chr(10))} function {mark(CLOSE, is_token)}",
            f"function: {any_of([f'function{i}' for i in range(len(called))])}",
        ]
        for i, tool in enumerate(called):
            rules += _function_rules(i, tool)
        if self.thinking:
            rules.append(thinking_rules(is_token, is_open=thinking_open))
        return "\n".join(rules)

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool = False
    ) -> str | None:
        return bound_answer(schema, is_token, is_open=thinking_open) if self.thinking else None


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
