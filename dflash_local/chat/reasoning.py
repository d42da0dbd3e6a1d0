"""Reasoning between marks such as `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.events import Event, Reasoning, joined
from dflash_local.chat.lark import json_rule, pattern, text_rule
from dflash_local.chat.parsing.marks import held

Marks = tuple[str, str]
OPEN, CLOSE = THINK = "<think>", "</think>"


class _ReasoningState(Enum):
    START = auto()
    BEFORE_REASONING = auto()
    REASONING = auto()
    BEFORE_ANSWER = auto()
    ANSWER = auto()


class ReasoningParser:
    """Parses what may come before the answer, and leaves the rest to `answer`.

    White space around the reasoning and its marks belongs to the format and is left out.
    """

    def __init__(self, answer: Parser, marks: Marks = THINK, *, is_open: bool) -> None:
        self._answer = answer
        self._open, self._close = marks
        self._state = _ReasoningState.BEFORE_REASONING if is_open else _ReasoningState.START
        self._text = ""

    def feed(self, text: str) -> list[Event]:
        if self._state is _ReasoningState.ANSWER:
            return self._answer.feed(text)
        self._text += text
        events: list[Event] = []
        while self._step(events):
            pass
        return joined(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state is _ReasoningState.START:
            events += self._answer.feed(self._text)
        elif self._state is _ReasoningState.REASONING:
            events.append(Reasoning(self._text))
        return joined(events + self._answer.finish())

    def _step(self, events: list[Event]) -> bool:
        """Move to the next part. False: more text is needed, or the answer has begun."""
        text = self._text
        if self._state is _ReasoningState.REASONING:
            return self._reason(events)
        rest = text.lstrip()
        if self._state is _ReasoningState.START:
            if rest.startswith(self._open):
                self._state, self._text = _ReasoningState.BEFORE_REASONING, rest[len(self._open) :]
                return True
            if self._open.startswith(rest):
                return False
            rest = text
        elif not rest:
            return False
        elif self._state is _ReasoningState.BEFORE_REASONING:
            self._state, self._text = _ReasoningState.REASONING, rest
            return True
        self._state, self._text = _ReasoningState.ANSWER, ""
        events += self._answer.feed(rest)
        return False

    def _reason(self, events: list[Event]) -> bool:
        thought, close, rest = self._text.partition(self._close)
        if close:
            events.append(Reasoning(thought.rstrip()))
            self._state, self._text = _ReasoningState.BEFORE_ANSWER, rest
            return True
        shown = thought[: len(thought) - held(thought, (self._close,))].rstrip()
        events.append(Reasoning(shown))
        self._text = thought[len(shown) :]
        return False


def reasoning_rules(is_token: IsToken, marks: Marks = THINK, *, is_open: bool) -> str:
    """Lark rules `reasoning` and what it needs: an optional reasoning part, or the rest of one."""
    opening, closing = marks
    begun = "thought GAP" if is_open else f"({text_rule(opening, is_token)} thought GAP)?"
    rules = [f"reasoning: {begun}", thought_rules(closing, is_token), r"GAP: /\n{0,2}/"]
    return "\n".join(rules)


def thought_rules(closing: str, is_token: IsToken) -> str:
    """Lark rules `thought` and what it needs: any text up to a mark, and that mark."""
    if is_token(closing):
        # No token can match within a terminal, so it ends before the mark by itself.
        return f"thought: THOUGHT {closing}\n" + r"THOUGHT: /(.|\n)*/"
    return rf"thought[lazy]: /(.|\n)*{pattern(closing)}/"


def json_after_reasoning(
    schema: Mapping[str, Any], is_token: IsToken, marks: Marks = THINK, *, is_open: bool
) -> str:
    """A Lark grammar of an optional reasoning part, then JSON text of `schema`."""
    rules = [
        "start: reasoning answer",
        json_rule("answer", schema, lenient=False),
        reasoning_rules(is_token, marks, is_open=is_open),
    ]
    return "\n".join(rules)
