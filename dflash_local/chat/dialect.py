"""How a family of models writes reasoning and tool calls into its text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from dflash_local.chat.events import Event
from dflash_local.chat.tool import Tool

IsToken = Callable[[str], bool]
"""Whether a text is the name of one control or user-defined token of the vocabulary."""


class Parser(Protocol):
    """Turns one answer's text into events.

    However the text is cut into pieces, the events join to the same. Text is held back only as long
    as it may still become a mark of the dialect or a call. What only looks like a call comes out as
    content, unchanged: broken JSON, an unknown tool, no end, or a call inside a code block.
    """

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of the answer."""
        ...

    def finish(self) -> list[Event]:
        """The events of the text that was held back: the answer has ended."""
        ...


class Dialect(ABC):
    """One family's way of writing. It has no state of its own."""

    opens_with_mark: ClassVar[bool] = False
    """Whether every answer opens with marks of the family, so that plain text cannot begin one."""
    special: bool
    """Whether the parser needs the names of control tokens in the text."""

    @property
    def has_calls(self) -> bool:
        """Whether it is known how the model calls tools."""
        return True

    @property
    def calls_are_json(self) -> bool:
        """Whether a call is a bare JSON object, which no mark tells from an answer in JSON."""
        return False

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The marks around reasoning, where it has such."""
        return None

    def without_reasoning(self) -> Dialect:
        """The same, but what stands between the marks of reasoning is content, with the marks."""
        return self

    def is_thinking(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside a reasoning part, which the answer will close."""
        marks = self.reasoning_marks
        return marks is not None and prompt.rstrip().endswith(marks[0])

    def has_thought(self, prompt: str) -> bool:
        """Whether a rendered prompt ends behind a reasoning part."""
        marks = self.reasoning_marks
        return marks is not None and prompt.rstrip().endswith(marks[1])

    @abstractmethod
    def parser(self, tools: Sequence[Tool], *, thinking_open: bool = False) -> Parser:
        """A parser for one answer that may call `tools`.

        `thinking_open` says that the prompt ends inside a reasoning part.
        """

    @abstractmethod
    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, is_token: IsToken, thinking_open: bool
    ) -> str | None:
        """A Lark grammar for llguidance that forces a call of one of `tools`, after reasoning if
        the model reasons.

        `parallel` allows several calls where the family can write several. None where the family
        has no calls.
        """

    @abstractmethod
    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool
    ) -> str | None:
        """A Lark grammar for llguidance that binds the answer's content to a JSON schema, after
        reasoning if the model reasons. None where an answer is content and nothing else."""
