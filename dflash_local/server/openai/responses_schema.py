"""What `/v1/responses` is sent: https://platform.openai.com/docs/api-reference/responses/create.

Nothing is stored: `store` is answered with false, and what would need a stored response is refused.
Tools that OpenAI runs itself, as its web search, are left out of what the model is told, and of
what the answer says it was told.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields
from dflash_local.server.answering.tools import (
    Function,
    FunctionTool,
    NamedFunction,
    NamedTool,
    ToolName,
)
from dflash_local.server.http.errors import REFUSED, ApiError
from dflash_local.server.openai.chat_schema import Contents
from dflash_local.server.openai.response_format import JsonObjectFormat, TextFormat

_STORED = "nothing is stored here; send the whole conversation as input, and leave {} out"
_REFUSED = {
    "previous_response_id": (_STORED, "previous_response_not_found"),
    "conversation": (_STORED, None),
    "prompt": (_STORED, None),
    "background": ("answers are not made in the background here; leave {} out", None),
}


class InputMessage(BaseModel):
    """A message; of an assistant what it once answered."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents

    @model_validator(mode="before")
    @classmethod
    def _refusals(cls, given: Any) -> Any:
        """A refusal is what the assistant said."""
        parts = given.get("content") if isinstance(given, dict) else None
        if not isinstance(parts, list):
            return given
        said = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in parts
        ]
        return {**given, "content": said or ""}


class FunctionCall(BaseModel):
    """A call that a former answer made; `arguments` is a JSON text."""

    type: Literal["function_call"]
    call_id: bounds.Label
    name: bounds.Name
    arguments: bounds.JsonText


class FunctionCallOutput(BaseModel):
    """What the called function gave back."""

    type: Literal["function_call_output"]
    call_id: bounds.Label
    output: Contents


class ReasoningText(BaseModel):
    text: bounds.Text


class ReasoningItem(BaseModel):
    """What a former answer thought; templates that know it show it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=bounds.MAX_MESSAGES)] | None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in _KINDS else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type=REFUSED,
        custom_error_message=f"an item is an object with a type, one of {', '.join(_KINDS)}",
    ),
]


def _text_or_items(value: Any) -> str:
    return "items" if isinstance(value, list) else "text"


Input = Annotated[
    Annotated[bounds.Text, Tag("text")]
    | Annotated[
        Annotated[list[InputItem], Field(min_length=1, max_length=bounds.MAX_MESSAGES)],
        Tag("items"),
    ],
    Discriminator(_text_or_items),
]


class FunctionOfResponses(Function):
    type: Literal["function"]


class HostedTool(BaseModel):
    """One that OpenAI runs itself."""

    type: bounds.Label


def _function_or_hosted(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "function" if kind == "function" else "hosted"


ToolOfResponses = Annotated[
    Annotated[FunctionOfResponses, Tag("function")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_function_or_hosted),
]


class NamedChoice(BaseModel):
    type: Literal["function"]
    name: ToolName


class NamedSchemaFormat(BaseModel):
    """JSON of a schema: always strictly, `strict` or not."""

    type: Literal["json_schema"]
    name: bounds.Label | None = None
    json_schema: bounds.JsonObject = Field(default_factory=dict, alias="schema")


class TextSettings(BaseModel):
    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")]
        | None
    ) = None

    @property
    def schema_of_answer(self) -> Any:
        """True for any JSON object, None for free text."""
        given = self.format
        if given is None or isinstance(given, TextFormat):
            return None
        return given.json_schema or True


class ReasoningSettings(BaseModel):
    effort: bounds.Label | None = None


_Metadata = Annotated[dict[bounds.Label, bounds.Label], Field(max_length=16)]


class ResponsesRequest(SamplingFields):
    """A text or a conversation to answer. Where one model is served any name is taken; the answer
    names ours."""

    input: Input
    instructions: bounds.Text | None = None
    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    max_output_tokens: bounds.MaxTokens | None = None
    tools: Annotated[list[ToolOfResponses], Field(max_length=bounds.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bounds.Flag | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Annotated[list[bounds.Label], Field(max_length=64)] | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    metadata: _Metadata | None = None
    chat_template_kwargs: bounds.JsonObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, (line, code) in _REFUSED.items():
                if given.get(name) not in (None, False):
                    raise ApiError(400, line.format(name), param=name, code=code)
        return given

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model can call."""
        return [
            FunctionTool(function=Function(**tool.model_dump(exclude={"type"})))
            for tool in self.tools or ()
            if isinstance(tool, FunctionOfResponses)
        ]

    @property
    def choice(self) -> Any:
        """`tool_choice` as chats have it."""
        given = self.tool_choice
        if isinstance(given, NamedChoice):
            return NamedTool(type="function", function=NamedFunction(name=given.name))
        return given


def messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation as chat templates read it; of an assistant's turn one message."""
    told: list[dict[str, Any]] = []
    if request.instructions:
        told.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*told, {"role": "user", "content": request.input}]
    for item in request.input:
        if isinstance(item, FunctionCallOutput):
            content = _shown(item.output)
            told.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, FunctionCall):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(told).setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            if item.content:
                thought = "".join(part.text for part in item.content)
                _turn(told, "reasoning_content")["reasoning_content"] = thought
        elif item.role == "assistant":
            _turn(told, "content")["content"] = _shown(item.content)
        else:
            told.append({"role": item.role, "content": _shown(item.content)})
    for message in told:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return told


def _turn(told: list[dict[str, Any]], *fields: str) -> dict[str, Any]:
    """The assistant's message that is still open for `fields`, or a new one.

    Reasoning comes before content, content before calls.
    """
    order = ("reasoning_content", "content", "tool_calls")
    last = told[-1] if told and told[-1]["role"] == "assistant" else None
    if last is not None:
        later = order[order.index(fields[0]) :] if fields else ()
        if all(last.get(name) is None for name in later):
            return last
    told.append({"role": "assistant", "content": None})
    return told[-1]


def _shown(content: Any) -> Any:
    return content if isinstance(content, str) else [part.model_dump() for part in content]
