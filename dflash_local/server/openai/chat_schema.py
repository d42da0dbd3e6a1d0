"""Requests to `/v1/chat/completions`.

https://platform.openai.com/docs/api-reference/chat/create, without the fields that a text model
cannot serve: these are refused where ignoring them would change the answer's meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.chat.tool import Tool
from dflash_local.server.answering import bounds
from dflash_local.server.answering.chat import split_begun
from dflash_local.server.answering.sampling_fields import token_limit
from dflash_local.server.answering.tools import (
    AllowedToolsChoice,
    Choice,
    FunctionTool,
    NamedTool,
    ToolCall,
    ToolChoice,
)
from dflash_local.server.http.errors import REFUSED, bad_request
from dflash_local.server.openai.choices import ChoicesRequest

_REFUSED = {
    "functions": "functions are OpenAI's old way to give tools; give `tools`",
    "function_call": "function_call is OpenAI's old way to ask for a tool; give `tool_choice`",
    "audio": "this server makes no audio; leave it out",
    "web_search_options": "this server does not search the web; leave web_search_options out",
}


class TextPart(BaseModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: bounds.Text

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "refusal":
            return {"type": "text", "text": given.get("refusal")}
        if isinstance(kind, str):
            return {**given, "type": "text"}
        return given


class ImageUrl(BaseModel):
    """A picture as a data URI, or its address, if the server may fetch that."""

    url: bounds.Picture

    @model_validator(mode="before")
    @classmethod
    def _or_alone(cls, given: Any) -> Any:
        return {"url": given} if isinstance(given, str) else given


class ImagePart(BaseModel):
    """A picture in a message; as OpenAI's Responses have it, `input_image` with the address as a
    text."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl


_TEXTS = ("text", "input_text", "output_text", "refusal")
_IMAGES = ("image_url", "input_image")


def _known(part: Any) -> Any:
    """Refuses a part of another kind, and names it."""
    kind = bounds.field_of(part, "type")
    if isinstance(kind, str) and kind not in (*_TEXTS, *_IMAGES):
        raise PydanticCustomError(
            REFUSED,
            "models read text and images here; they take no part of type {kind}",
            {"kind": kind[:64]},
        )
    return part


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[ImagePart, Tag("image")],
    Discriminator(lambda value: "image" if bounds.field_of(value, "type") in _IMAGES else "text"),
    BeforeValidator(_known),
]
Contents = Annotated[
    bounds.TextOr[bounds.SomeMessagesOf[Part]],
    BeforeValidator(lambda given: "" if given == [] else given),  # what said nothing
]


class ChatMessage(BaseModel):
    """The fields of all messages."""

    name: bounds.Label | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        return {"content": None, **self.model_dump(exclude_none=True)}


class PlainMessage(ChatMessage):
    """Of the user, the system, or of a role that only the model's template knows."""

    role: bounds.Name
    content: Contents


class AssistantMessage(ChatMessage):
    """`reasoning_content` is that of an earlier answer; templates that know it show it."""

    role: Literal["assistant"]
    content: Contents | None = None
    reasoning_content: bounds.Text | None = None
    reasoning: bounds.Text | None = None
    refusal: bounds.Text | None = None
    tool_calls: bounds.ToolsOf[ToolCall] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            self.content = self.refusal or ""
        return self


class ToolMessage(ChatMessage):
    role: Literal["tool"]
    content: Contents
    tool_call_id: bounds.Label | None = None


_OWN_FORMS = ("assistant", "tool")


def _form(message: Any) -> str:
    role = bounds.field_of(message, "role")
    return role if role in _OWN_FORMS else "plain"


AnyMessage = Annotated[
    Annotated[PlainMessage, Tag("plain")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    Discriminator(_form),
]


class ChatRequest(ChoicesRequest):
    """A conversation to answer. A server of one model takes any model name; the answer has the
    server's own.

    `draft_detail` adds a field of that name to each chunk of a stream: the pieces of its text that
    were accepted drafts, the tokens of each verify pass, and why the controller drafts or does not.
    A last message of the assistant begins the answer, as with llama-server, unless
    `continue_final_message` is false. Without `add_generation_prompt` the prompt ends with it. With
    a `reasoning_format` of "none", llama-server's, thoughts stay in the content. After
    `reasoning_budget_tokens`, also called `thinking_budget_tokens` and `reasoning_budget`, thoughts
    are ended; -1 is no limit. `verbose` adds the prompt that the chat template has written, as
    llama-server has it.
    """

    messages: bounds.SomeMessagesOf[AnyMessage]
    draft_detail: bounds.Flag | None = None
    max_completion_tokens: bounds.Predict | None = None
    logprobs: bounds.Flag | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    tools: bounds.ToolsOf[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bounds.Flag | None = None
    reasoning_effort: bounds.Label | None = None
    reasoning_budget_tokens: bounds.Predict | None = None
    thinking_budget_tokens: bounds.Predict | None = None
    reasoning_budget: bounds.Predict | None = None
    reasoning_budget_message: bounds.Label | None = None
    chat_template_kwargs: bounds.JsonObject | None = None
    add_generation_prompt: bounds.Flag | None = None
    continue_final_message: bounds.Flag | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None
    verbose: bounds.Flag | None = None
    modalities: bounds.ListOf[bounds.Label] | None = None

    _refuse = bounds.refuse(_REFUSED, unless=(None, [], "none", "auto"))

    @property
    def limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return token_limit("max_completion_tokens", self.max_completion_tokens)
        return super().limit

    @property
    def budget(self) -> int | None:
        """The most tokens of thoughts."""
        given = self.reasoning_budget_tokens, self.thinking_budget_tokens, self.reasoning_budget
        return next((n for n in given if n is not None), None)

    @property
    def n_alternatives(self) -> int | None:
        """The number to report with each token; None for no log-probabilities."""
        if self.logprobs:
            return self.top_logprobs or self.n_probs or 0
        return self.n_probs or None

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt goes on after the last message with the beginning of another."""
        return self.add_generation_prompt is not False or bool(self.continue_final_message)

    @property
    def functions(self) -> list[Tool]:
        """The tools that the model can call."""
        return [tool.function.tool for tool in self.tools or ()]

    @property
    def choice(self) -> Choice:
        given = self.tool_choice
        if isinstance(given, NamedTool):
            return "required", [given.function.name]
        if isinstance(given, AllowedToolsChoice):
            allowed = given.allowed_tools
            return allowed.mode, [tool.function.name for tool in allowed.tools]
        return given or "auto", None

    @property
    def conversation(self) -> tuple[list[dict[str, Any]], str]:
        """The messages as chat templates read them, and the beginning of the answer."""
        messages = [message.for_template() for message in self.messages]
        if self.continue_final_message is False or not self.begins_answer:
            return messages, ""
        return split_begun(messages)

    def check(self) -> None:
        super().check()
        is_asked = self.continue_final_message is None and self.begins_answer
        last_two = [each for each in self.messages[-2:] if isinstance(each, AssistantMessage)]
        # As llama-server, which refuses to go on with the second of two answers without calls.
        if is_asked and sum(not each.tool_calls for each in last_two) == 2:
            raise bad_request(
                "the last two messages are both of the assistant, so which of them begins the "
                "answer is not clear; join them, or set continue_final_message",
                param="messages",
            )
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise bad_request(
                    "continue_final_message and add_generation_prompt contradict each other; leave "
                    "out one of the two",
                    param="continue_final_message",
                )
            last = self.messages[-1]
            if not isinstance(last, AssistantMessage) or last.tool_calls or len(self.messages) < 2:
                raise bad_request(
                    "continue_final_message needs a last message of the assistant with text, after "
                    "one of the user",
                    param="continue_final_message",
                )
        if self.draft_detail and not self.stream:
            raise bad_request("draft_detail is for streams; set stream", param="draft_detail")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs; set it to true", param="top_logprobs")
        if self.modalities is not None and self.modalities != ["text"]:
            raise bad_request(
                'this model writes text; modalities can only be ["text"]', param="modalities"
            )
