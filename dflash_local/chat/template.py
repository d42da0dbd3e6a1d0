"""The chat template of a model file: turns messages and tools into the text of a prompt."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from dflash_local.chat.conversation import conversation
from dflash_local.chat.tool import Tool
from dflash_local.errors import InputError
from dflash_local.trial.child import WarmChild

MAX_SECONDS = 2.0
MAX_CHARACTERS = 16 << 20
"""Of a prompt: more than any context holds."""


class ChatTemplate:
    """Turns messages into a prompt that ends where the assistant's answer begins.

    `source` is the jinja2 text of the GGUF's `tokenizer.chat_template`, None where the file has
    none; `bos` and `eos` are the texts of these tokens. A rendering that takes longer than
    `max_seconds` or writes more than `max_characters` is stopped. Any thread may render. Raises
    InputError if there is no template, or a bad one.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos: str,
        eos: str,
        max_seconds: float = MAX_SECONDS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        if not source:
            raise InputError(
                "the model file has no chat template; use raw completion with a prompt of your own"
            )
        self._source = source
        self._max_seconds = max_seconds
        self._max_characters = max_characters
        self._ours = {"bos_token": bos, "eos_token": eos}
        self._lock = threading.Lock()
        _, fault, _ = self._answer({})
        if fault:
            raise InputError(f"the model's chat template cannot be read: {fault}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        begin_answer: bool = True,
        /,
        *,
        tools: Sequence[Mapping[str, Any] | Tool] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`; see `conversation` for their shapes. Without `begin_answer` it
        ends with the last of them.

        `tools` are what the model may call, in OpenAI's shape; `kwargs` the template's own
        variables, such as `enable_thinking=False`. Where the template has no place for a system
        message, as Gemma 2's, its text begins the first turn of the user. The prompt has a
        beginning-of-text token only if the template writes one. Raises InputError for messages of
        another shape, for variables that the caller may not set, if the template refuses the
        messages, and if it takes too long or writes too much.
        """
        shown = conversation(messages, self._source)
        offered = _offered(tools)
        ours = {
            **self._ours,
            "messages": shown,
            # Firefunction's name for the tools, as a text.
            "functions": _functions(offered),
            "function_call": None,
            "add_generation_prompt": begin_answer,
        }
        taken = sorted({*ours, "raise_exception", "self", "strftime_now"} & kwargs.keys())
        if taken:
            raise InputError(
                f"chat_template_kwargs may not set {', '.join(taken)}, which the chat itself sets"
            )
        now = datetime.now()
        variables = {
            "tool_choice": None,
            # llama-server's: without them Llama 3.1's template takes a day of 2024, and templates
            # differ in what they do with an `enable_thinking` that is not there.
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y"),
            "enable_thinking": True,
            # Names that templates have for one thing: the reasoning of earlier answers, where the
            # messages have it, stays. So the prompt goes on from what the cache has.
            "preserve_thinking": True,
            "clear_thinking": False,
            "truncate_history_thinking": False,
            "drop_thinking": False,
            **kwargs,
            "tools": offered or None,
            **ours,
        }
        merged = _without_system(shown)
        try:
            text = self._rendered(variables)
            if merged is None or not self._leaves_out_system(text, variables):
                return text
        except InputError:
            if merged is None:
                raise
        return self._rendered({**variables, "messages": merged})

    def _leaves_out_system(self, text: str, variables: Mapping[str, Any]) -> bool:
        """Whether the text of a conversation is the same without its system message."""
        system, *others = variables["messages"]
        if system["content"].strip() in text:
            return False
        return text == self._rendered({**variables, "messages": others})

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        text, fault, is_said = self._answer({"variables": variables})
        if is_said:
            # Some templates cannot do with a variable that is null, or join arguments as texts.
            text, other, _ = self._answer({"variables": _as_llama_server(variables)})
            if not other:
                return text
        if fault:
            raise InputError(f"the model's chat template refuses this: {fault}")
        return text

    def _answer(self, request: dict[str, Any]) -> tuple[str, str, bool]:
        """The text and the fault of a rendering, by a child process, and whether the template
        itself said that fault."""
        request |= {"source": self._source, "max_characters": self._max_characters}
        # One at a time, so that a template that hangs takes one process at most.
        with self._lock, _child() as child:
            try:
                outcome = child.ask(request, limit_s=self._max_seconds)
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(
                    f"messages, tools and variables of a chat must be JSON: {error}"
                ) from None
        if outcome.done:
            return str(outcome.said[-1].get("text", "")), "", False
        if outcome.short:
            return "", f"it takes longer than {self._max_seconds:g} s", False
        fault = outcome.fault or outcome.death or "its process ended"
        return "", fault, bool(outcome.fault)


def _offered(tools: object) -> list[dict[str, Any]]:
    """Tools, perhaps from the variables of a client, as a template reads them."""
    found = tools or ()
    if not isinstance(found, Sequence) or not all(isinstance(t, (Tool, Mapping)) for t in found):
        raise InputError("tools are not a list of objects; give each as a function with a name")
    return [tool.shown() if isinstance(tool, Tool) else dict(tool) for tool in found]


def _functions(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([tool.get("function", tool) for tool in tools], indent=4) if tools else ""


def _as_llama_server(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that are not null, with the arguments of calls as texts."""
    found = {name: value for name, value in variables.items() if value is not None}
    found["messages"] = [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in variables["messages"]
    ]
    return found


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with a system message in front put into the user's message after it; None where
    there are no such two."""
    if len(messages) < 2 or [message["role"] for message in messages[:2]] != ["system", "user"]:
        return None
    system, user = messages[0]["content"], messages[1]
    return [{**user, "content": f"{system}\n{user['content']}"}, *messages[2:]]


_MOST_IDLE = 2
_idle: list[WarmChild] = []
"""Children that render the templates of all models. Appending and popping are atomic."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # two processes cannot talk to one child


@contextmanager
def _child() -> Iterator[WarmChild]:
    """A child for one request. It is kept for others unless it has ended."""
    child = None
    while child is None or not child.is_alive:
        child = _idle.pop() if _idle else WarmChild("dflash_local.chat.template_child")
    try:
        yield child
    finally:
        if child.is_alive and len(_idle) < _MOST_IDLE:
            _idle.append(child)
