"""Qwen's way, after Nous Hermes: a JSON object between `<tool_call>` and `</tool_call>`.

Formats: the chat templates of Qwen2.5, QwQ and Qwen3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.dialects.plain import Plain
from dflash_local.chat.lark import literal, mark, object_calls
from dflash_local.chat.parsing.call_reader import ObjectCallReader
from dflash_local.chat.parsing.tagged_calls import TaggedCallParser
from dflash_local.chat.tool import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Hermes(Plain):
    """`thinking`: the model may reason between `<think>` and `</think>` first."""

    name: ClassVar[str] = "hermes"
    thinking: bool = True

    @staticmethod
    def _is_written_by(template: str) -> bool:
        return OPEN in template and '"arguments' in template.replace("\\", "")

    def _answer_parser(self, tools: Sequence[Tool]) -> Parser:
        names = {tool.name for tool in tools}
        return TaggedCallParser({OPEN: False}, CLOSE, lambda: ObjectCallReader(names))

    def _call_rules(self, tools: Sequence[Tool], is_token: IsToken) -> list[str]:
        open_, close = mark(OPEN, is_token), mark(CLOSE, is_token)
        return [
            f"call: {open_} {literal(chr(10))} object {literal(chr(10))} {close}",
            object_calls(tools, arguments="arguments"),
        ]
