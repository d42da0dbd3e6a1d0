"""Dialects whose marks are text: reasoning where the model reasons, then content and calls.

`Plain` itself is for models whose way of calling tools is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.events import NewId, call_id
from dflash_local.chat.thinking import Answer, Thinking, bound_answer, thinking_rules
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
        answer = self._reader(tools, new_id) if tools else Answer()
        return Thinking(answer, is_open=thinking_open) if self.thinking else answer

    def call_grammar(
        self,
        tools: Sequence[Tool],
        *,
        choice: str,
        parallel: bool,
        is_token: IsToken,
        thinking_open: bool = False,
    ) -> str | None:
        rules = self._call_rules(tools, choice, is_token)
        if rules is None:
            return None
        more = ' ("\\n" call)*' if parallel else ""
        rules = [f"start: {'reasoning ' if self.thinking else ''}call{more}", *rules]
        if self.thinking:
            rules.append(thinking_rules(is_token, is_open=thinking_open))
        return "\n".join(rules)

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool = False
    ) -> str | None:
        return bound_answer(schema, is_token, is_open=thinking_open) if self.thinking else None

    def _reader(self, tools: Sequence[Tool], new_id: NewId) -> Parser:
        """A parser of what comes after the reasoning, which may call `tools`."""
        return Answer()

    def _call_rules(
        self, tools: Sequence[Tool], choice: str, is_token: IsToken
    ) -> list[str] | None:
        """Lark rules `call` and what it needs; None where the family has no calls."""
        return None
