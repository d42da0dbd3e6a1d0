"""Requests to `/v1/responses`: https://platform.openai.com/docs/api-reference/responses/create.

Nothing is stored: the answer says `store: false`, and requests that need a stored response are
refused. Tools that OpenAI runs itself, such as its web search, are not shown to the model, nor
listed in the answer.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields
from dflash_local.server.answering.tools import Arguments, Choice, Function, HostedTool, ToolName
from dflash_local.server.http.errors import REFUSED
from dflash_local.server.openai.chat_schema import Contents
from dflash_local.server.openai.choices import JsonObjectFormat, TextFormat

_STORED = "nothing is stored here; send the whole conversation as input, and leave {} out"
_REFUSED = {
    "previous_response_id": _STORED.format("previous_response_id"),
    "conversation": _STORED.format("conversation"),
    "prompt": _STORED.format("prompt"),
    "background": "there are no background answers here; leave background out",
}


class InputMessage(BaseModel):
    """A message; one of the assistant is an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents


class FunctionCall(BaseModel):
    """A call that an earlier answer made; `arguments` is a JSON text."""

    type: Literal["function_call"]
    call_id: bounds.Label
    name: bounds.Name
    arguments: Arguments


class FunctionCallOutput(BaseModel):
    """The called function's result."""

    type: Literal["function_call_output"]
    call_id: bounds.Label
    output: Contents


class ReasoningText(BaseModel):
    text: bounds.Text


class ReasoningItem(BaseModel):
    """The reasoning of an earlier answer; templates that know it show it."""

    type: Literal["reasoning"]
    content: bounds.MessagesOf[ReasoningText] | None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind(value: Any) -> str | None:
    kind = bounds.field_of(value, "type")
    if kind is None and isinstance(value, dict) and "type" not in value:
        return "message"
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


class FunctionOfResponses(Function):
    type: Literal["function"]


ToolOfResponses = Annotated[
    Annotated[FunctionOfResponses, Tag("function")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(
        lambda value: "function" if bounds.field_of(value, "type") == "function" else "hosted"
    ),
]


class NamedChoice(BaseModel):
    type: Literal["function"]
    name: ToolName


class NamedSchemaFormat(BaseModel):
    """JSON of a schema: always strictly, whatever `strict` says."""

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


_Metadata = Annotated[dict[bounds.Label, bounds.Label], Field(max_length=16), bounds.Few]


class ResponsesRequest(SamplingFields):
    """A text or a conversation to answer. A server of one model takes any model name; the answer
    has the server's own."""

    input: bounds.TextOr[bounds.SomeMessagesOf[InputItem]]
    instructions: bounds.Text | None = None
    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    max_output_tokens: bounds.MaxTokens | None = None
    tools: bounds.ToolsOf[ToolOfResponses] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bounds.Flag | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Annotated[bounds.ListOf[bounds.Label], Field(max_length=64)] | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    metadata: _Metadata | None = None
    chat_template_kwargs: bounds.JsonObject | None = None

    _refuse = bounds.refuse(
        _REFUSED,
        unless=(None, False),
        codes={"previous_response_id": "previous_response_not_found"},
    )

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def functions(self) -> list[FunctionOfResponses]:
        """The tools that the model can call."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionOfResponses)]

    @property
    def choice(self) -> Choice:
        given = self.tool_choice
        if isinstance(given, NamedChoice):
            return "required", [given.name]
        return given or "auto", None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it: one message for each turn of the
        assistant."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, FunctionCallOutput):
                content = _for_template(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            elif isinstance(item, FunctionCall):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _turn(messages).setdefault("tool_calls", []).append(call)
            elif isinstance(item, ReasoningItem):
                if item.content:
                    thought = "".join(part.text for part in item.content)
                    _turn(messages, "reasoning_content")["reasoning_content"] = thought
            elif item.role == "assistant":
                _turn(messages, "content")["content"] = _for_template(item.content)
            else:
                messages.append({"role": item.role, "content": _for_template(item.content)})
        for message in messages:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        return messages


def _turn(messages: list[dict[str, Any]], field: str | None = None) -> dict[str, Any]:
    """The assistant's message that can still get `field`, or a new one.

    Reasoning comes before content, content before calls.
    """
    order = ("reasoning_content", "content", "tool_calls")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is not None:
        later = order[order.index(field) :] if field else ()
        if all(last.get(name) is None for name in later):
            return last
    messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _for_template(content: Any) -> Any:
    return content if isinstance(content, str) else [part.model_dump() for part in content]
