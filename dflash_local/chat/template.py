"""The chat template of a model file, rendered in jinja2's immutable sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_local import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)
from dflash_local.errors import InputError

# isort: split
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

_OURS = frozenset(
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


class ChatTemplate:
    """Turns messages into a prompt that ends where the assistant's answer begins.

    `source` is the jinja2 text of the GGUF's `tokenizer.chat_template`, None where the file has
    none; `bos` and `eos` are the texts of these tokens. Raises InputError for no or a bad template.
    """

    def __init__(self, source: str | None, *, bos: str, eos: str) -> None:
        if not source:
            raise InputError(
                "the model file has no chat template; use raw completion with a prompt of your own"
            )
        try:
            self._formatter = Jinja2ChatFormatter(source, eos_token=eos, bos_token=bos)
        except Exception as error:  # the file's text: jinja2 raises more than its own errors
            raise InputError(f"the model's chat template cannot be read: {_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], /, **kwargs: Any) -> str:
        """The prompt for `messages`, each with a `role` and a `content` of text.

        `kwargs` are the template's own variables, such as `enable_thinking=False` or `tools`. A
        template that puts a beginning-of-text token does so in its text. Raises InputError for
        messages of another shape, for names that are not the caller's to set, and for whatever the
        template objects to.
        """
        _check_messages(messages)
        taken = sorted(_OURS & kwargs.keys())
        if taken:
            raise InputError(
                f"chat_template_kwargs may not set {', '.join(taken)}, which the chat itself sets"
            )
        try:
            return self._formatter(messages=[dict(m) for m in messages], **kwargs).prompt  # type: ignore[misc]
        except Exception as error:  # a template is a program, and may fail in any way
            raise InputError(f"the model's chat template refuses this: {_line(error)}") from error

    @staticmethod
    def thinking_open(prompt: str) -> bool:
        """Whether a rendered prompt ends inside a reasoning part, which the answer then closes."""
        return prompt.rstrip().endswith("<think>")


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InputError(
            f"messages are {_kind(messages)}; give a list of at least one message, each "
            '{"role": ..., "content": ...}'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(
                f"message {index} is {_kind(message)}; give an object with role and content"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = _kind(message[key]) if key in message else "missing"
                raise InputError(f"message {index}: {key} is {found}; give a text")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)) and not value:
        return "empty"
    return f"of type {type(value).__name__}"


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    lineno = getattr(error, "lineno", None)
    return f"{text} (line {lineno} of the template)" if lineno else text
