"""How a family of models writes reasoning and tool calls into its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dflash_local.chat.events import Event, NewId, call_id
from dflash_local.chat.tool import Tool

IsToken = Callable[[str], bool]
"""Whether a text is the name of one control or user-defined token of the vocabulary."""


class Parser(Protocol):
    """Turns one answer's text into events.

    However the text is cut into pieces, the events join to the same. Text is held back only as long
    as it may still become a mark of the dialect or a call; what merely looks like a call (broken
    JSON, a name that is no tool's, no end, inside a code block) comes out as content, unchanged.
    """

    def feed(self, text: str) -> list[Event]:
        """The next piece of the answer."""
        ...

    def finish(self) -> list[Event]:
        """No more text comes: what was held back."""
        ...


class Dialect(Protocol):
    """One family's way of writing; without state."""

    @property
    def name(self) -> str: ...

    @property
    def special(self) -> bool:
        """Whether the parser needs the names of control tokens in the text."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer, beside the model's end-of-text tokens."""
        ...

    def parser(
        self, tools: Sequence[Tool], *, thinking_open: bool = False, new_id: NewId = call_id
    ) -> Parser:
        """A parser for one answer that may call `tools`.

        `thinking_open` says that the prompt ends inside a reasoning part.
        """
        ...

    def call_grammar(
        self,
        tools: Sequence[Tool],
        *,
        choice: str,
        parallel: bool,
        is_token: IsToken,
        thinking_open: bool = False,
    ) -> str | None:
        """A Lark grammar for llguidance that forces a call, after reasoning if the model reasons.

        `choice` is "required" for any of `tools`, or the name of one; `parallel` allows several
        calls where the family can write several. None where the family has no calls.
        """
        ...

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool = False
    ) -> str | None:
        """A Lark grammar for llguidance that binds the answer's content to a JSON schema, after
        reasoning if the model reasons. None where the content is all that an answer has."""
        ...
