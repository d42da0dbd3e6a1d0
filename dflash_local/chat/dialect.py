"""The way a family of models writes reasoning and tool calls into its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dflash_local.chat.form import Form, Marks
from dflash_local.chat.lark import IsToken, call_rules, json_rule, reasoning_rules, text_rule
from dflash_local.chat.parsing.answer import AnswerParser
from dflash_local.chat.parsing.parser import Parser
from dflash_local.chat.tool import Tool


@dataclass(frozen=True)
class Dialect:
    """Answers by the form of their template: reasoning if the model reasons, then content and
    calls. It has no state of its own.

    Without a `form` the model calls no tools. `thinking`: the marks around what it may reason
    first. `tag`: what may come before calls without a mark. `silent`: the marks around content.
    `special`: whether the parser needs the names of control tokens in the text.
    """

    form: Form | None = None
    thinking: Marks | None = None
    tag: str = ""
    silent: tuple[str, ...] = ()
    special: bool = False
    behind_reasoning: ClassVar[str] = ""
    before_answer: ClassVar[str] = ""
    """What is always written there, beside the marks. So plain text cannot begin such an answer."""

    @property
    def calls_are_json(self) -> bool:
        """Whether a call is a bare JSON object, which no mark tells from an answer in JSON."""
        return self.form is not None and self.form.is_bare

    def without_reasoning(self) -> Dialect:
        """The same, but what stands between the marks of reasoning is content, with the marks."""
        return replace(self, thinking=None)

    def is_thinking(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside a reasoning part, which the answer will close."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking[0])

    def has_thought(self, prompt: str) -> bool:
        """Whether a rendered prompt ends behind reasoning, perhaps empty as a sign not to think."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking[1])

    def parser(self, tools: Sequence[Tool], *, thinking_open: bool = False) -> Parser:
        """A parser for one answer that may call `tools`.

        `thinking_open` says that the prompt ends inside a reasoning part.
        """
        return AnswerParser(
            self.form if tools or self.silent else None,
            {tool.name: tool for tool in tools},
            self.thinking,
            is_open=thinking_open,
            tag=self.tag,
            silent=self.silent if self.form else (),
        )

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, is_token: IsToken, thinking_open: bool
    ) -> str | None:
        """A Lark grammar for llguidance that forces a call of one of `tools`, after reasoning if
        the model reasons.

        `parallel` allows several calls where the family can write several. None where the family
        has no calls.
        """
        if self.form is None:
            return None
        # Without a mark the model makes one call in an answer.
        rules = call_rules(self.form, tools, is_token, parallel=parallel and not self.form.is_bare)
        return self._after_reasoning("calls", rules, is_token, thinking_open)

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool
    ) -> str | None:
        """A Lark grammar for llguidance that binds the answer's content to a JSON schema, after
        reasoning if the model reasons. None where an answer is content and nothing else."""
        if self.thinking is None:
            return None
        lead = text_rule(self.before_answer, is_token)
        rules = [f"answer: {lead} content", json_rule("content", schema, lenient=False)]
        return self._after_reasoning("answer", rules, is_token, thinking_open)

    def _after_reasoning(
        self, name: str, rules: list[str], is_token: IsToken, is_open: bool
    ) -> str:
        if self.thinking is None:
            return "\n".join([f"start: {name}", *rules])
        reasoning = reasoning_rules(is_token, self.thinking, self.behind_reasoning, is_open=is_open)
        return "\n".join([f"start: reasoning {name}", *rules, *reasoning])
