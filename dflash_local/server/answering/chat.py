"""A conversation made ready for the model: its prompt, its grammar, and the reader of its answer.

The chats of all APIs end up here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import Event
from dflash_local.chat.pictures import Pictures
from dflash_local.chat.quoting import unquoted
from dflash_local.chat.reader import ChatReader
from dflash_local.errors import GrammarError, InputError
from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.remote_images import RemoteImages
from dflash_local.server.answering.sampling_fields import SamplingFields, sampling_options
from dflash_local.server.answering.token_logprobs import LogprobStream, chat_logprobs
from dflash_local.server.answering.tools import ToolUse
from dflash_local.server.http.errors import bad_request
from dflash_local.target_model.images import n_cells


@dataclass(frozen=True)
class PreparedChat:
    """`prompt`: token ids. `sampling`: how it is sampled where the request does not say.
    `bindings`: the keyword arguments of `Model.astream` that tools or a schema need.
    `thinking_open`: the prompt ends inside of a reasoning part."""

    prompt: list[int]
    sampling: Mapping[str, Any]
    bindings: dict[str, Any]
    dialect: Dialect
    tools: ToolUse
    thinking_open: bool
    warning: str | None = None
    """For the client."""
    text: str = ""
    """The prompt of a chat as its template has written it."""

    def options(
        self, fields: SamplingFields, *, max_tokens: int | None, logprobs: int | None = None
    ) -> dict[str, Any]:
        """All keyword arguments of `Model.astream`. `logprobs`: the number of alternatives to each
        token; None for no log-probabilities."""
        asked = {**self.sampling, **sampling_options(fields)}
        options = {**asked, **self.bindings, "max_tokens": max_tokens}
        if logprobs is not None:
            options["logprobs"] = logprobs
        return options


_NO_TOOLS = (
    "the tools of this request were left out, as the model's chat template has no place for them: "
    "take a model that was trained for tools"
)


def input_tokens(chat: PreparedChat) -> dict[str, Any]:
    """The answer of routes that count the tokens of a prompt, in OpenAI's form."""
    return {"object": "response.input_tokens", "input_tokens": n_cells(chat.prompt)}


def split_begun(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """A conversation without the answer that its last message begins, and that beginning: a last
    message of the assistant, unless it makes calls or is the only one.

    Raises ApiError if it holds reasoning, which no template can leave open.
    """
    last = messages[-1]
    if len(messages) < 2 or last["role"] != "assistant" or last.get("tool_calls"):
        return messages, ""
    if last.get("reasoning_content") or last.get("reasoning"):
        raise bad_request(
            "the last message begins the answer, but holds reasoning; leave that out",
            param="messages",
        )
    content = last.get("content") or ""
    if not isinstance(content, str):
        content = "\n\n".join(part.get("text", "") for part in content)  # as llama-server has it
    return messages[:-1], content


def prepare_chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: ToolUse | None = None,
    schema: Mapping[str, Any] | bool | None = None,
    reasoning_effort: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    reasoning_budget: int | None = None,
    reasoning_budget_message: str | None = None,
    begun: str = "",
    begin_answer: bool = True,
) -> PreparedChat:
    """Render, tokenise, and choose the grammar. It may take long: call it on another thread.

    `schema` binds the answer's content: a JSON schema, or True for any object. `reasoning_effort`
    is for templates that know it; "none" also tells templates like Qwen3's not to think. `begun` is
    the beginning of the answer, which the model goes on from. The budget and its message are as
    `Model.thinking_budget` has them. Without `begin_answer` the prompt ends with the last message.
    Raises ApiError for requests beyond this model, InputError for those its template refuses.
    """
    tools = tools or ToolUse()
    variables = dict(template_kwargs or {})
    if reasoning_effort is not None:
        usual = {"enable_thinking": False} if reasoning_effort == "none" else {}
        variables = {"reasoning_effort": reasoning_effort, **usual, **variables}
    vocabulary = model.target.vocabulary
    pictures = Pictures(model.projector, RemoteImages().fetch if model.remote_images else None)
    text = model.rendered_chat(
        messages,
        tools=tools.shown or None,
        chat_template_kwargs=variables,
        begin_answer=begin_answer,
        pictures=pictures,
    )
    prompt = pictures.tokenized(text, vocabulary, model.n_ctx)
    thinking_open = model.thinking_open(prompt)
    dialect = model.dialect
    try:
        bindings = model.bindings(
            prompt,
            tools=tools.allowed,
            required=tools.required,
            parallel=tools.parallel,
            schema=schema,
        )
    except GrammarError:
        raise
    except InputError as error:
        param = "tool_choice" if tools.required else "response_format"
        raise bad_request(str(error), param=param) from None
    if begun:
        if bindings or thinking_open or dialect.before_answer:
            raise bad_request(
                "an answer can be begun for the model only where it is free text without reasoning "
                "before it; end the conversation with a message of the user, or set "
                "continue_final_message to false in an OpenAI chat",
                param="messages",
            )
        prompt += vocabulary.tokenize(begun, special=False, add_special=False, n_ctx=model.n_ctx)
    elif limit := model.thinking_budget(
        reasoning_budget, reasoning_budget_message, thinking_open=thinking_open
    ):
        bindings["thinking_budget"] = limit
    if dialect.special:
        bindings["special"] = True
    sampling = model.chat_sampling(variables)
    shows_tools = re.search(r"\b(tools|functions)\b", model.target.chat_template or "")
    warning = _NO_TOOLS if tools.shown and not shows_tools else None
    shown = pictures.shown(unquoted(text)) + begun
    return PreparedChat(prompt, sampling, bindings, dialect, tools, thinking_open, warning, shown)


class ChatAnswer(ChatReader):
    """Reads one answer to a chat. If the chat does not allow parallel calls, calls after the
    first are left out. `logprobs` tells those of its tokens, where they were asked for.
    `raw_thoughts` leaves reasoning in the content."""

    def __init__(
        self,
        model: Model,
        chat: PreparedChat,
        *,
        logprobs: bool = False,
        raw_thoughts: bool = False,
    ) -> None:
        dialect = chat.dialect.without_reasoning() if raw_thoughts else chat.dialect
        parser = dialect.parser(chat.tools.allowed, thinking_open=chat.thinking_open)
        super().__init__(parser, None if chat.tools.parallel else 1)
        self.result: Result
        """Once the answer is complete."""
        self.logprobs = LogprobStream(model.target.vocabulary, chat_logprobs if logprobs else None)
        self._starts: list[int] = []
        """Of its tokens, in characters of its text."""

    @property
    def finish_reason(self) -> str:
        reason = self.result.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def take(self, chunk: Chunk) -> list[Event]:
        self.logprobs.push(chunk)
        self._starts += chunk.starts
        if chunk.result is not None:
            self.result = chunk.result
        return super().take(chunk)

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens of the reasoning's own text, without the marks around it."""
        if not self.thoughts:
            return 0
        text, parts, end = self.result.text, [], 0
        for part in self.thoughts:
            begin = text.find(part, end)
            if begin >= 0:
                end = begin + len(part)
                parts.append(range(begin, end))
        return sum(any(start in part for part in parts) for start in self._starts)
