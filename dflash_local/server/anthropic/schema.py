"""Requests to `/v1/messages`: https://platform.claude.com/docs/en/api/messages/create.

Cache marks, metadata and other fields that only Anthropic's own servers use are ignored. Tools that
Anthropic runs itself are not shown to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.chat.tool import Tool
from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields
from dflash_local.server.answering.tools import Choice, HostedTool, ToolName
from dflash_local.server.http.errors import REFUSED

Block = TypeVar("Block")

_ATTRIBUTION = "x-anthropic-billing-header:"
"""The beginning of a block that Claude Code puts before its system prompt, for billing. It is not
an instruction, and differs between requests: nothing after it would be found in the cache."""


class TextBlock(BaseModel):
    type: Literal["text"]
    text: bounds.Text


class ThinkingBlock(BaseModel):
    """The reasoning of an earlier answer; templates that know it show it. It needs no signature."""

    type: Literal["thinking"]
    thinking: bounds.Text


class RedactedThinkingBlock(BaseModel):
    """Reasoning that only Anthropic can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: bounds.Label
    name: bounds.Name
    input: bounds.JsonObject


def _only(*kinds: str) -> BeforeValidator:
    """Refuses a block of another kind, and names it."""

    def check(given: Any) -> Any:
        kind = bounds.field_of(given, "type")
        if kind in kinds:
            return given
        if isinstance(given, dict) and isinstance(kind, str):
            raise PydanticCustomError(
                REFUSED,
                "no block of type {kind} is taken here, but {kinds}",
                {"kind": kind[:64], "kinds": ", ".join(kinds)},
            )
        raise PydanticCustomError(
            REFUSED, "a block is an object with a type: {kinds}", {"kinds": ", ".join(kinds)}
        )

    return BeforeValidator(check)


class Base64Source(BaseModel):
    """The file of a picture. One with an address is refused: nothing is fetched."""

    type: Literal["base64"]
    data: bounds.Picture

    @model_validator(mode="before")
    @classmethod
    def _is_here(cls, given: Any) -> Any:
        kind = bounds.field_of(given, "type")
        if isinstance(kind, str) and kind != "base64":
            raise PydanticCustomError(
                REFUSED, "an image is given in base64: nothing is fetched from elsewhere"
            )
        return given


class ImageBlock(BaseModel):
    type: Literal["image"]
    source: Base64Source


Texts = bounds.TextOr[bounds.MessagesOf[Annotated[TextBlock, _only("text")]]]
"""A text, or blocks of text."""


class ToolResultBlock(BaseModel):
    """A called tool's result; if it failed, its own words say so."""

    type: Literal["tool_result"]
    tool_use_id: bounds.Label
    content: (
        bounds.TextOr[
            bounds.MessagesOf[
                Annotated[
                    TextBlock | ImageBlock, Field(discriminator="type"), _only("text", "image")
                ]
            ]
        ]
        | None
    ) = None
    is_error: bounds.Flag | None = None


_UserBlock = Annotated[
    TextBlock | ImageBlock | ToolResultBlock,
    Field(discriminator="type"),
    _only("text", "image", "tool_result"),
]
_AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    Field(discriminator="type"),
    _only("text", "thinking", "redacted_thinking", "tool_use"),
]


class SystemTurn(BaseModel):
    """An instruction in the middle of a conversation."""

    role: Literal["system"]
    content: Texts


class UserTurn(BaseModel):
    role: Literal["user"]
    content: bounds.TextOr[bounds.MessagesOf[_UserBlock]]


class AssistantTurn(BaseModel):
    """An earlier answer. As the last message it is the beginning of the next answer."""

    role: Literal["assistant"]
    content: bounds.TextOr[bounds.MessagesOf[_AssistantBlock]]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CustomTool(BaseModel):
    """`input_schema` is the JSON schema of the input."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: bounds.Text | None = None
    input_schema: bounds.JsonObject


AnthropicTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(
        lambda value: "custom" if bounds.field_of(value, "type") in (None, "custom") else "hosted"
    ),
]


class AnthropicToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bounds.Flag | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> AnthropicToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("a choice of type tool needs the tool's name")
        return self


class ThinkingSettings(BaseModel):
    """After `budget_tokens` thoughts are ended. They count among the `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: bounds.Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(BaseModel):
    type: Literal["json_schema"]
    json_schema: bounds.JsonObject = Field(alias="schema")


class OutputSettings(BaseModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(BaseModel):
    """A conversation. A server of one model takes any model name; the answer has the server's
    own."""

    messages: bounds.SomeMessagesOf[Turn]
    model: bounds.Label | None = None
    system: Texts | None = None
    tools: bounds.ToolsOf[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings | None = None

    @property
    def thinks(self) -> bool:
        """As with Anthropic, models think only where they are asked to."""
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
    def functions(self) -> list[Tool]:
        """The tools that the model can call."""
        return [
            Tool(tool.name, tool.description, tool.input_schema)
            for tool in self.tools or ()
            if isinstance(tool, CustomTool)
        ]

    @property
    def choice(self) -> Choice:
        given = self.tool_choice
        if given is None:
            return "auto", None
        if given.type == "tool":
            return "required", [given.name or ""]
        return "required" if given.type == "any" else given.type, None

    @property
    def parallel(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it; neighbours of one role are one message."""
        messages: list[dict[str, Any]] = []
        system = _blocks(self.system or [])
        if told := [block for block in system if not block.text.startswith(_ATTRIBUTION)]:
            _add(messages, "system", *told)
        for turn in self.messages:
            if isinstance(turn, SystemTurn):
                messages.append({"role": "system", "content": _parts(turn.content)})
            elif isinstance(turn, UserTurn):
                _add_user(messages, turn)
            else:
                _add_assistant(messages, turn)
        return messages


class MessagesRequest(CountRequest, SamplingFields):
    """A conversation to answer."""

    max_tokens: bounds.MaxTokens
    stream: bounds.Flag | None = None
    stop: bounds.StopTexts | None = Field(None, alias="stop_sequences")


def _add_user(messages: list[dict[str, Any]], turn: UserTurn) -> None:
    for block in _blocks(turn.content or ""):  # no blocks are an empty text
        if isinstance(block, ToolResultBlock):
            result = _parts(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        else:
            _add(messages, "user", block)


def _add_assistant(messages: list[dict[str, Any]], turn: AssistantTurn) -> None:
    message = _add(messages, "assistant")
    for block in _blocks(turn.content):
        if isinstance(block, TextBlock):
            _add(messages, "assistant", block)
        elif isinstance(block, ThinkingBlock):
            thought = message.get("reasoning_content", "") + block.thinking
            message["reasoning_content"] = thought
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            call = {"id": block.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)


def _add(messages: list[dict[str, Any]], role: str, *blocks: TextBlock | ImageBlock) -> Any:
    """Add blocks to the last message where it is of `role`, else in a new one; that message."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    parts = messages[-1]["content"] or []
    messages[-1]["content"] = [*parts, *map(_part, blocks)] or ""
    return messages[-1]


def _parts(content: str | Sequence[TextBlock | ImageBlock] | None) -> Any:
    return [_part(block) for block in _blocks(content or [])] or ""


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{block.source.data}"}}


def _blocks(content: str | Sequence[Block]) -> Sequence[Block | TextBlock]:
    """A text as a block."""
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content
