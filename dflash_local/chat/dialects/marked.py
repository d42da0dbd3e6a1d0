"""Answers by the form of their template: reasoning if the model reasons, then content and calls.

Without a form it is the way of models that call no tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_local.chat.call_grammar import call_rules
from dflash_local.chat.dialect import Dialect, IsToken, Parser
from dflash_local.chat.events import Content, Event, joined
from dflash_local.chat.form import Form
from dflash_local.chat.parsing.tagged_calls import CallParser
from dflash_local.chat.reasoning import (
    Marks,
    ReasoningParser,
    json_after_reasoning,
    reasoning_rules,
)
from dflash_local.chat.tool import Tool


@dataclass(frozen=True)
class Marked(Dialect):
    """`thinking`: the marks around what the model may reason first.

    `tag`: what may come before calls without a mark. `silent`: the marks around content.
    """

    form: Form | None = None
    thinking: Marks | None = None
    tag: str = ""
    silent: tuple[str, ...] = ()
    special: bool = False

    @property
    def has_calls(self) -> bool:
        return self.form is not None

    @property
    def calls_are_json(self) -> bool:
        return self.form is not None and self.form.is_bare

    @property
    def reasoning_marks(self) -> Marks | None:
        return self.thinking

    def without_reasoning(self) -> Marked:
        return replace(self, thinking=None)

    @property
    def marks(self) -> str:
        form, texts = self.form, [*(self.thinking or ()), self.tag, *self.silent]
        if form is not None:
            tags = form.tags
            texts += [form.head, form.begin, form.middle, form.end, form.between, form.tail]
            texts += [tags.opening, tags.closing, *tags.values.values()] if tags else []
            texts += [form.quote or ""]
        return "\n".join(texts)

    def parser(self, tools: Sequence[Tool], *, thinking_open: bool = False) -> Parser:
        answer: Parser = ContentParser()
        if self.form is not None and (tools or self.silent):
            named = {tool.name: tool for tool in tools}
            answer = CallParser(self.form, named, tag=self.tag, silent=self.silent)
        if self.thinking is None:
            return answer
        return ReasoningParser(answer, self.thinking, is_open=thinking_open)

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, is_token: IsToken, thinking_open: bool
    ) -> str | None:
        if self.form is None:
            return None
        # Without a mark the model makes one call in an answer.
        rules = call_rules(self.form, tools, is_token, parallel=parallel and not self.form.is_bare)
        rules.insert(0, f"start: {'reasoning ' if self.thinking else ''}calls")
        if self.thinking:
            rules.append(reasoning_rules(is_token, self.thinking, is_open=thinking_open))
        return "\n".join(rules)

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool
    ) -> str | None:
        if self.thinking is None:
            return None
        return json_after_reasoning(schema, is_token, self.thinking, is_open=thinking_open)


class ContentParser:
    """Parses answers that are content and nothing else."""

    def feed(self, text: str) -> list[Event]:
        return joined([Content(text)])

    def finish(self) -> list[Event]:
        return []
