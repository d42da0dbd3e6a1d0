"""What `/v1/chat/completions` is sent.

https://platform.openai.com/docs/api-reference/chat/create, less what a model of texts cannot do:
such fields are refused with a line, where ignoring them would change what the answer means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields, token_limit
from dflash_local.server.answering.tools import FunctionTool, ToolCall, ToolChoice
from dflash_local.server.http.errors import REFUSED, ApiError
from dflash_local.server.openai.response_format import ResponseFormat

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REFUSED = {
    "functions": "functions are OpenAI's old way to give tools; give `tools`",
    "function_call": "function_call is OpenAI's old way to ask for a tool; give `tool_choice`",
    "audio": "audio is not made here; leave it out",
    "web_search_options": "this server searches no web; leave web_search_options out",
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
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            raise PydanticCustomError(
                REFUSED,
                "this model reads texts; it takes no part of type {kind}",
                {"kind": kind[:64]},
            )
        if isinstance(kind, str):
            return {**given, "type": "text"}
        return given


def _text_or_parts(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


_Parts = Annotated[list[TextPart], Field(min_length=1, max_length=bounds.MAX_MESSAGES)]
Contents = Annotated[
    Annotated[bounds.Text, Tag("text")] | Annotated[_Parts, Tag("parts")],
    Discriminator(_text_or_parts),
]


class _Message(BaseModel):
    name: bounds.Label | None = None

    def shown(self) -> dict[str, Any]:
        """As chat templates read it."""
        return {"content": None, **self.model_dump(exclude_none=True)}


class InstructionMessage(_Message):
    role: Literal["system", "developer"]
    content: Contents


class UserMessage(_Message):
    role: Literal["user"]
    content: Contents


class AssistantMessage(_Message):
    """`reasoning_content` is what a former answer came with; templates that know it show it."""

    role: Literal["assistant"]
    content: Contents | None = None
    reasoning_content: bounds.Text | None = None
    reasoning: bounds.Text | None = None
    refusal: bounds.Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=bounds.MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            self.content = self.refusal or ""
        return self


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Contents
    tool_call_id: bounds.Label | None = None


def _role(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    if role in ("system", "developer"):
        return "instruction"
    return role if role in _ROLES else None


Message = Annotated[
    Annotated[InstructionMessage, Tag("instruction")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    Discriminator(
        _role,
        custom_error_type=REFUSED,
        custom_error_message=f"a message is an object with a role, one of {', '.join(_ROLES)}",
    ),
]


class StreamOptions(BaseModel):
    include_usage: bounds.Flag | None = None


class ChatRequest(SamplingFields):
    """A conversation to go on with. Where one model is served any name is taken; the answer names
    the one here.

    `draft_detail` adds a field of that name to each chunk of a stream: which pieces of its text
    were accepted drafts, what each verify pass emitted, and why the controller drafts or does not.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=bounds.MAX_MESSAGES)]
    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    stream_options: StreamOptions | None = None
    draft_detail: bounds.Flag | None = None
    n: bounds.Choices | None = None
    max_tokens: bounds.Predict | None = None
    max_completion_tokens: bounds.Predict | None = None
    n_predict: bounds.Predict | None = None
    logprobs: bounds.Flag | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=bounds.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bounds.Flag | None = None
    reasoning_effort: bounds.Label | None = None
    chat_template_kwargs: bounds.JsonObject | None = None
    json_schema: bounds.JsonObject | None = None
    modalities: list[bounds.Label] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, line in _REFUSED.items():
                if given.get(name) not in (None, [], "none", "auto"):
                    raise ApiError(400, line, param=name)
        return given

    @property
    def limit(self) -> int | None:
        """Tokens of an answer; None: to the end of text or of the context."""
        if self.max_completion_tokens is not None:
            return token_limit("max_completion_tokens", self.max_completion_tokens)
        if self.max_tokens is not None or self.n_predict is None:
            return token_limit("max_tokens", self.max_tokens)
        # 0 is llama.vim's way to have a prompt read into the cache.
        return token_limit("n_predict", self.n_predict or 1)

    def check(self) -> None:
        """Raises ApiError where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options are for streams; set stream", param="stream_options"
            )
        if self.draft_detail and not self.stream:
            raise ApiError(400, "draft_detail is for streams; set stream", param="draft_detail")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs; set it to true", param="top_logprobs")
        if self.modalities is not None and self.modalities != ["text"]:
            raise ApiError(
                400, 'this model writes text; modalities can only be ["text"]', param="modalities"
            )
