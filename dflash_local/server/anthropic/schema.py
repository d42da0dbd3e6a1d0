"""What `/v1/messages` is sent: https://platform.claude.com/docs/en/api/messages/create.

Marks for a cache, metadata and what else only Anthropic's own servers have a use for are ignored.
Tools that they run themselves are left out of what the model is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields
from dflash_local.server.answering.tools import (
    Function,
    FunctionTool,
    NamedFunction,
    NamedTool,
    ToolName,
)
from dflash_local.server.http.errors import REFUSED

_ATTRIBUTION = "x-anthropic-billing-header:"
"""Begins a block that Claude Code puts before its system prompt, for Anthropic's billing. It is no
instruction, and differs from request to request: behind it, nothing would be found in the cache."""


class TextBlock(BaseModel):
    type: Literal["text"]
    text: bounds.Text


class ThinkingBlock(BaseModel):
    """What a former answer thought; templates that know it show it. No signature is asked for."""

    type: Literal["thinking"]
    thinking: bounds.Text


class RedactedThinkingBlock(BaseModel):
    """What only Anthropic can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A call that a former answer made."""

    type: Literal["tool_use"]
    id: bounds.Label
    name: bounds.Name
    input: bounds.JsonObject


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _only(*kinds: str) -> BeforeValidator:
    """Refuses a block of another kind by its name."""

    def check(given: Any) -> Any:
        kind = _kind(given)
        if kind in kinds:
            return given
        if isinstance(given, dict) and isinstance(kind, str):
            raise PydanticCustomError(
                REFUSED,
                "this model reads texts; it takes no block of type {kind} here, but {kinds}",
                {"kind": kind[:64], "kinds": ", ".join(kinds)},
            )
        raise PydanticCustomError(
            REFUSED, "a block is an object with a type: {kinds}", {"kinds": ", ".join(kinds)}
        )

    return BeforeValidator(check)


def _text_or_blocks(value: Any) -> str:
    return "blocks" if isinstance(value, list) else "text"


_Texts = Annotated[list[Annotated[TextBlock, _only("text")]], Field(max_length=bounds.MAX_MESSAGES)]
Texts = Annotated[
    Annotated[bounds.Text, Tag("text")] | Annotated[_Texts, Tag("blocks")],
    Discriminator(_text_or_blocks),
]
"""A text, or blocks of text."""


class ToolResultBlock(BaseModel):
    """What a called tool gave back; one that failed says so in its own words."""

    type: Literal["tool_result"]
    tool_use_id: bounds.Label
    content: Texts | None = None
    is_error: bounds.Flag | None = None


_UserBlock = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("text")] | Annotated[ToolResultBlock, Tag("tool_result")],
        Discriminator(_kind),
    ],
    _only("text", "tool_result"),
]
_AssistantBlock = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("text")]
        | Annotated[ThinkingBlock, Tag("thinking")]
        | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
        | Annotated[ToolUseBlock, Tag("tool_use")],
        Discriminator(_kind),
    ],
    _only("text", "thinking", "redacted_thinking", "tool_use"),
]


class SystemMessage(BaseModel):
    """An instruction in the middle of a conversation."""

    role: Literal["system"]
    content: Texts


class UserMessage(BaseModel):
    role: Literal["user"]
    content: Annotated[
        Annotated[bounds.Text, Tag("text")]
        | Annotated[
            Annotated[list[_UserBlock], Field(max_length=bounds.MAX_MESSAGES)], Tag("blocks")
        ],
        Discriminator(_text_or_blocks),
    ]


class AssistantMessage(BaseModel):
    """What a former answer said. As the last message it is the beginning of the next answer."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[bounds.Text, Tag("text")]
        | Annotated[
            Annotated[list[_AssistantBlock], Field(max_length=bounds.MAX_MESSAGES)], Tag("blocks")
        ],
        Discriminator(_text_or_blocks),
    ]


def _role(value: Any) -> Any:
    return value.get("role") if isinstance(value, dict) else getattr(value, "role", None)


Message = Annotated[
    Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[SystemMessage, Tag("system")],
    Discriminator(
        _role,
        custom_error_type=REFUSED,
        custom_error_message="a message is an object with a role, one of user, assistant, system",
    ),
]


class CustomTool(BaseModel):
    """`input_schema` is the JSON schema of the input."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: bounds.Text | None = None
    input_schema: bounds.JsonObject


class HostedTool(BaseModel):
    """One that Anthropic runs itself, or describes to its own models alone."""

    type: bounds.Label


def _custom_or_hosted(value: Any) -> str:
    return "custom" if _kind(value) in (None, "custom") else "hosted"


Tool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_custom_or_hosted),
]


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bounds.Flag | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("a choice of type tool needs the tool's name")
        return self


class ThinkingSettings(BaseModel):
    """`budget_tokens` is ignored: what a model thinks counts among its `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(BaseModel):
    type: Literal["json_schema"]
    json_schema: bounds.JsonObject = Field(alias="schema")


class OutputSettings(BaseModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(BaseModel):
    """A conversation. Where one model is served any name is taken; the answer names ours."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=bounds.MAX_MESSAGES)]
    model: bounds.Label | None = None
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=bounds.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings | None = None

    @property
    def thinks(self) -> bool:
        """Unless asked to, models do not think: so it is with Anthropic's."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def effort(self) -> str | None:
        """`reasoning_effort` as chat templates know it."""
        given = self.output_config.effort if self.output_config else None
        return "high" if given in ("xhigh", "max") else given

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        given = self.output_config.format if self.output_config else None
        return given.json_schema if given else None

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model can call."""
        return [
            FunctionTool(
                function=Function(
                    name=tool.name, description=tool.description, parameters=tool.input_schema
                )
            )
            for tool in self.tools or ()
            if isinstance(tool, CustomTool)
        ]

    @property
    def choice(self) -> Any:
        """`tool_choice` as chats have it."""
        given = self.tool_choice
        if given is None or given.type != "tool":
            return None if given is None else {"any": "required"}.get(given.type, given.type)
        return NamedTool(type="function", function=NamedFunction(name=given.name or ""))

    @property
    def parallel(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use


class MessagesRequest(CountRequest, SamplingFields):
    """A conversation to go on with."""

    max_tokens: bounds.MaxTokens
    stream: bounds.Flag | None = None
    stop: bounds.StopTexts | None = Field(None, alias="stop_sequences")


def chat_messages(request: CountRequest) -> list[dict[str, Any]]:
    """The conversation as chat templates read it; neighbours of one role are one message."""
    told: list[dict[str, Any]] = []
    system = [text for text in _texts(request.system) if not text.startswith(_ATTRIBUTION)]
    if system:
        _say(told, "system", system)
    for message in request.messages:
        if isinstance(message, SystemMessage):
            told.append({"role": "system", "content": _parts(_texts(message.content))})
        elif isinstance(message, UserMessage):
            _user(told, message)
        else:
            _assistant(told, message)
    return told


def _user(told: list[dict[str, Any]], message: UserMessage) -> None:
    if isinstance(message.content, str):
        _say(told, "user", [message.content])
        return
    for block in message.content:
        if isinstance(block, TextBlock):
            _say(told, "user", [block.text])
        else:
            result = _parts(_texts(block.content))
            told.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})


def _assistant(told: list[dict[str, Any]], message: AssistantMessage) -> None:
    content = message.content
    said = _say(told, "assistant", [content] if isinstance(content, str) else [])
    for block in () if isinstance(content, str) else content:
        if isinstance(block, TextBlock):
            _say(told, "assistant", [block.text])
        elif isinstance(block, ThinkingBlock):
            said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            call = {"id": block.id, "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)


def _say(told: list[dict[str, Any]], role: str, texts: Iterable[str]) -> dict[str, Any]:
    """Add texts to the last message where it is of `role`, else as a new one; that message."""
    if not told or told[-1]["role"] != role:
        told.append({"role": role, "content": ""})
    parts = told[-1]["content"] or []
    told[-1]["content"] = [*parts, *_parts(texts)] or ""
    return told[-1]


def _parts(texts: Iterable[str]) -> Any:
    return [{"type": "text", "text": text} for text in texts] or ""


def _texts(content: str | list[TextBlock] | None) -> list[str]:
    if content is None or isinstance(content, str):
        return [content] if content else []
    return [block.text for block in content]
