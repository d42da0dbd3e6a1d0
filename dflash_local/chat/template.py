"""The chat template of a model file: turns messages and tools into the text of a prompt."""

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from dflash_local.chat.conversation import conversation
from dflash_local.chat.tool import Tool
from dflash_local.errors import InputError
from dflash_local.trial.child import WarmChildren

MAX_SECONDS = 2.0
MAX_CHARACTERS = 16 << 20
"""Of a prompt: more than any context holds."""
_CHILDREN = WarmChildren("dflash_local.chat.template_child")
"""They render the templates of all models."""
_USUAL = {
    "tool_choice": None,
    # llama-server's: templates differ in what they do with one that is not there.
    "enable_thinking": True,
    # Names that templates have for one thing: the reasoning of earlier answers, where the
    # messages have it, stays. So the prompt goes on from what the cache has.
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
"""Variables that a caller may set otherwise."""


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
        self._rendered(None)

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
        functions = [tool.get("function", tool) for tool in offered]
        ours = {
            **self._ours,
            "messages": shown,
            # Firefunction's name for the tools, as a text.
            "functions": json.dumps(functions, indent=4) if functions else "",
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
            **_USUAL,
            # llama-server's: without them Llama 3.1's template takes a day of 2024.
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y"),
            **kwargs,
            "tools": offered or None,
            **ours,
        }
        merged = _without_system(shown)
        if merged is None:
            return self._rendered(variables)
        with suppress(InputError):
            text = self._rendered(variables)
            # Whether the text is the same without the system message.
            if shown[0]["content"].strip() in text or text != self._rendered(
                {**variables, "messages": shown[1:]}
            ):
                return text
        return self._rendered({**variables, "messages": merged})

    def _rendered(self, variables: Mapping[str, Any] | None) -> str:
        """The text that a child process renders; without variables it only reads the template."""
        request = {"source": self._source, "variables": variables, "most": self._max_characters}
        # One at a time, so that a template that hangs takes one process at most.
        with self._lock:
            try:
                outcome = _CHILDREN.ask(request, limit_s=self._max_seconds)
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(
                    f"messages, tools and variables of a chat must be JSON: {error}"
                ) from None
        if outcome.done:
            return str(outcome.said[-1]["text"])
        fault = outcome.fault or outcome.death or "its process ended"
        if outcome.short:
            fault = f"it takes longer than {self._max_seconds:g} s"
        failed = "cannot be read" if variables is None else "refuses this"
        raise InputError(f"the model's chat template {failed}: {fault}")


def _offered(tools: object) -> list[dict[str, Any]]:
    """Tools, perhaps from the variables of a client, as a template reads them."""
    found = tools or ()
    if not isinstance(found, Sequence) or not all(isinstance(t, (Tool, Mapping)) for t in found):
        raise InputError("tools are not a list of objects; give each as a function with a name")
    return [tool.shown() if isinstance(tool, Tool) else dict(tool) for tool in found]


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with a system message put into the user's after it, if there are these two."""
    if len(messages) < 2 or [message["role"] for message in messages[:2]] != ["system", "user"]:
        return None
    system, user = messages[0]["content"], messages[1]
    return [{**user, "content": f"{system}\n{user['content']}"}, *messages[2:]]
