"""Answers whose marks are text: reasoning if the model reasons, then content and calls.

`Plain` itself is for models whose way of calling tools is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_local.chat.dialect import Dialect, IsToken, Parser
from dflash_local.chat.events import Content, Event, joined
from dflash_local.chat.reasoning import ReasoningParser, json_after_reasoning, reasoning_rules
from dflash_local.chat.tool import Tool


@dataclass(frozen=True)
class Plain(Dialect):
    """`thinking`: the model may reason between `<think>` and `</think>` first."""

    name: ClassVar[str] = "plain"
    thinking: bool = False

    @classmethod
    def of(cls, template: str) -> Plain | None:
        if not cls._is_written_by(template):
            return None
        return cls("<think>" in template or "</think>" in template)

    def parser(self, tools: Sequence[Tool], *, thinking_open: bool = False) -> Parser:
        answer = self._answer_parser(tools) if tools else ContentParser()
        return ReasoningParser(answer, is_open=thinking_open) if self.thinking else answer

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, is_token: IsToken, thinking_open: bool
    ) -> str | None:
        rules = self._call_rules(tools, is_token)
        if rules is None:
            return None
        more = ' ("\\n" call)*' if parallel else ""
        rules = [f"start: {'reasoning ' if self.thinking else ''}call{more}", *rules]
        if self.thinking:
            rules.append(reasoning_rules(is_token, is_open=thinking_open))
        return "\n".join(rules)

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool
    ) -> str | None:
        if not self.thinking:
            return None
        return json_after_reasoning(schema, is_token, is_open=thinking_open)

    # What another dialect of this kind has of its own.

    @staticmethod
    def _is_written_by(template: str) -> bool:
        """Whether a chat template writes the marks of this dialect."""
        return True

    def _answer_parser(self, tools: Sequence[Tool]) -> Parser:
        """A parser of what comes after the reasoning, which may call `tools`."""
        return ContentParser()

    def _call_rules(self, tools: Sequence[Tool], is_token: IsToken) -> list[str] | None:
        """Lark rules: `call` and those that it needs. None where the family has no calls."""
        return None


class ContentParser:
    """Parses answers that are content and nothing else."""

    def feed(self, text: str) -> list[Event]:
        return joined([Content(text)])

    def finish(self) -> list[Event]:
        return []
