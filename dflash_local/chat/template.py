"""The chat template of a model file: turns messages and tools into the text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from dflash_local.chat.conversation import conversation
from dflash_local.chat.sandbox import MAX_CHARACTERS, MAX_SECONDS, Sandbox, bounded
from dflash_local.chat.tool import Tool
from dflash_local.errors import InputError

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "function_call",
        "functions",
        "messages",
        "raise_exception",
        "self",
        "strftime_now",
    }
)
"""Variables that a caller may not set."""


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
        self._limits = (max_seconds, max_characters)
        self._ours = {"bos_token": bos, "eos_token": eos}
        try:
            # Constant parts of a template are computed when it is read.
            with bounded(*self._limits):
                self._template = Sandbox().from_source(source)
        except Exception as error:  # jinja2 raises more than its own errors for such a text
            raise InputError(f"the model's chat template cannot be read: {_line(error)}") from error

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
        taken = sorted(_RESERVED & kwargs.keys())
        if taken:
            raise InputError(
                f"chat_template_kwargs may not set {', '.join(taken)}, which the chat itself sets"
            )
        offered = [tool.shown() if isinstance(tool, Tool) else tool for tool in tools or ()]
        variables = {
            "tool_choice": None,
            # llama-server's: without them Llama 3.1's template takes a day of 2024, and templates
            # differ in what they do with an `enable_thinking` that is not there.
            "date_string": _now("%d %b %Y"),
            "enable_thinking": True,
            **kwargs,
            **self._ours,
            "messages": shown,
            "tools": offered or None,
            "functions": None,
            "function_call": None,
            "add_generation_prompt": begin_answer,
            "raise_exception": _raise,
            "strftime_now": _now,
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
        try:
            with bounded(*self._limits):
                return self._template.render(variables)
        except Exception as error:  # a template is a program, and may fail in any way
            raise InputError(f"the model's chat template refuses this: {_line(error)}") from error

    @staticmethod
    def thinking_open(prompt: str) -> bool:
        """Whether a rendered prompt ends inside a reasoning part, which the answer will close."""
        return prompt.rstrip().endswith("<think>")


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with a system message in front put into the user's message after it; None where
    there are no such two."""
    if len(messages) < 2 or [message["role"] for message in messages[:2]] != ["system", "user"]:
        return None
    system, user = messages[0]["content"], messages[1]
    return [{**user, "content": f"{system}\n{user['content']}"}, *messages[2:]]


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    lineno = getattr(error, "lineno", None)
    return f"{text} (line {lineno} of the template)" if lineno else text
