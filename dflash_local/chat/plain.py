"""Models whose way of calling tools is not known: content, and reasoning where they reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.events import NewId, call_id
from dflash_local.chat.thinking import Answer, Thinking, bound_answer
from dflash_local.chat.tool import Tool


@dataclass(frozen=True)
class Plain:
    """`thinking`: the model may reason between `<think>` and `</think>` first."""

    thinking: bool = False
    name: str = "plain"
    special: bool = False
    stop: tuple[str, ...] = ()

    def parser(
        self, tools: Sequence[Tool], *, thinking_open: bool = False, new_id: NewId = call_id
    ) -> Parser:
        return Thinking(Answer(), is_open=thinking_open) if self.thinking else Answer()

    def call_grammar(
        self,
        tools: Sequence[Tool],
        *,
        choice: str,
        parallel: bool,
        is_token: IsToken,
        thinking_open: bool = False,
    ) -> None:
        return None

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool = False
    ) -> str | None:
        return bound_answer(schema, is_token, is_open=thinking_open) if self.thinking else None
