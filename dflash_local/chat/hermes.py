"""Qwen's way, after Nous Hermes: a JSON object between `<tool_call>` and `</tool_call>`.

Formats: the chat templates of Qwen2.5, QwQ and Qwen3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.chat.call_reader import ObjectCall
from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.events import NewId
from dflash_local.chat.lark import literal, mark, object_calls
from dflash_local.chat.plain import Plain
from dflash_local.chat.tagged_calls import TaggedCalls
from dflash_local.chat.tool import Tool, chosen

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Hermes(Plain):
    """`thinking`: the model may reason between `<think>` and `</think>` first."""

    thinking: bool = True
    name: str = "hermes"

    def _reader(self, tools: Sequence[Tool], new_id: NewId) -> Parser:
        names = {tool.name for tool in tools}
        return TaggedCalls({OPEN: False}, CLOSE, lambda: ObjectCall(names), new_id)

    def _call_rules(self, tools: Sequence[Tool], choice: str, is_token: IsToken) -> list[str]:
        open_, close = mark(OPEN, is_token), mark(CLOSE, is_token)
        return [
            f"call: {open_} {literal(chr(10))} object {literal(chr(10))} {close}",
            object_calls(chosen(tools, choice), arguments="arguments"),
        ]
