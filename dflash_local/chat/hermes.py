"""Qwen's way, after Nous Hermes: a JSON object between `<tool_call>` and `</tool_call>`.

Formats: the chat templates of Qwen2.5, QwQ and Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.chat.call_reader import ObjectCall
from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.events import NewId, call_id
from dflash_local.chat.lark import literal, mark, object_calls
from dflash_local.chat.tagged_calls import TaggedCalls
from dflash_local.chat.thinking import Answer, Thinking, bound_answer, thinking_rules
from dflash_local.chat.tool import Tool, chosen

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Hermes:
    """`thinking`: the model may reason between `<think>` and `</think>` first."""

    thinking: bool = True
    name: str = "hermes"
    special: bool = False
    stop: tuple[str, ...] = ()

    def parser(
        self, tools: Sequence[Tool], *, thinking_open: bool = False, new_id: NewId = call_id
    ) -> Parser:
        names = {tool.name for tool in tools}
        answer: Parser = (
            TaggedCalls({OPEN: False}, CLOSE, lambda: ObjectCall(names), new_id)
            if tools
            else Answer()
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
        open_, close = mark(OPEN, is_token), mark(CLOSE, is_token)
        more = ' ("\\n" call)*' if parallel else ""
        rules = [
            f"start: {'reasoning ' if self.thinking else ''}call{more}",
            f"call: {open_} {literal(chr(10))} object {literal(chr(10))} {close}",
            object_calls(chosen(tools, choice), arguments="arguments"),
        ]
        if self.thinking:
            rules.append(thinking_rules(is_token, is_open=thinking_open))
        return "\n".join(rules)

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool = False
    ) -> str | None:
        return bound_answer(schema, is_token, is_open=thinking_open) if self.thinking else None
