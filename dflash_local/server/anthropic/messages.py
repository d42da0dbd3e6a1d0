"""`/v1/messages`: https://platform.claude.com/docs/en/api/messages.

Cache marks, metadata and other fields that only Anthropic's own servers use are ignored. Tools that
Anthropic runs itself are not shown to the model.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.chat.conversation import complete_fields
from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.chat.tool import Tool
from dflash_local.model import Model
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import on_model, respond
from dflash_local.server.answering.chat import ChatAnswer, PreparedChat, prepare_chat, split_begun
from dflash_local.server.answering.generation import GenerationTask, stream_all, timings
from dflash_local.server.answering.sampling_fields import SamplingFields
from dflash_local.server.answering.tools import Choice, HostedTool, ToolName, tool_use
from dflash_local.server.http.errors import REFUSED, AnthropicErrorBody, error_responses
from dflash_local.server.http.event_stream import NamedEvent, event_form
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.target_model.images import n_cells

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
    def choice(self) -> Choice:
        given = self.tool_choice
        if given is None:
            return "auto", None
        if given.type == "tool":
            return "required", [given.name or ""]
        return "required" if given.type == "any" else given.type, None

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
                for block in _blocks(turn.content or ""):  # no blocks are an empty text
                    if isinstance(block, ToolResultBlock):
                        tool = {"role": "tool", "tool_call_id": block.tool_use_id}
                        messages.append({**tool, "content": _parts(block.content)})
                    else:
                        _add(messages, "user", block)
            else:
                _add_assistant(messages, turn)
        return messages


class MessagesRequest(CountRequest, SamplingFields):
    """A conversation to answer."""

    max_tokens: bounds.MaxTokens
    stream: bounds.Flag | None = None
    stop: bounds.StopTexts | None = Field(None, alias="stop_sequences")


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


def event(kind: str, **data: Any) -> NamedEvent:
    """An event, which is named as its type is."""
    return NamedEvent(kind, {"type": kind, **data})


class ContentBlocks:
    """The content blocks of a message and their events, while the answer arrives. Each run of
    reasoning, each run of text and each call becomes a block: it starts, grows, and stops before
    the next one starts.

    `content` has the blocks so far, as the whole message has them. Without `thinking`, reasoning is
    left out.
    """

    def __init__(self, *, thinking: bool) -> None:
        self.content: list[dict[str, Any]] = []
        self._thinking = thinking
        self._is_open = False
        self._input = ""

    def take(self, added: Event) -> Iterator[NamedEvent]:
        match added:
            case Reasoning(text):
                if self._thinking:
                    yield from self._text("thinking", text)
            case Content(text):
                yield from self._text("text", text)
            case ToolCallStart(_, id, name):
                yield from self._start({"type": "tool_use", "id": id, "name": name, "input": {}})
                self._input = ""
            case ToolCallArguments(_, text):
                self._input += text
                delta = {"type": "input_json_delta", "partial_json": text}
                yield self._event("content_block_delta", delta=delta)

    def close(self) -> Iterator[NamedEvent]:
        """The event that ends the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = complete_fields(self._input)
        yield self._event("content_block_stop")

    def _text(self, kind: str, text: str) -> Iterator[NamedEvent]:
        if not self._is_open or self.content[-1]["type"] != kind:
            # Anthropic signs reasoning; here nothing does, and nothing asks for the signature.
            unsigned = {"signature": ""} if kind == "thinking" else {}
            yield from self._start({"type": kind, kind: "", **unsigned})
        self.content[-1][kind] += text
        yield self._event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})

    def _start(self, block: dict[str, Any]) -> Iterator[NamedEvent]:
        yield from self.close()
        self._is_open = True
        self.content.append(block)
        yield self._event("content_block_start", content_block=dict(block))

    def _event(self, kind: str, **data: Any) -> NamedEvent:
        return event(kind, index=len(self.content) - 1, **data)


router = APIRouter(responses=error_responses(AnthropicErrorBody))

_EVENTS = event_form(done=None, keep_alive=event("ping"), name_error=True)


@router.post("/v1/messages")
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation, in one piece or as a stream of named events."""
    form = _EVENTS if body.stream else None
    return await respond(request, body.model, body, _prepare, _MessageAnswer, form)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountRequest) -> dict[str, int]:
    """Count the tokens of a conversation's prompt. Nothing is generated."""
    chat = await on_model(request, body.model, body, _prepare)
    return {"input_tokens": n_cells(chat.prompt)}


def _prepare(model: Model, body: CountRequest) -> PreparedChat:
    messages, begun = split_begun(body.chat_messages())
    tools = [
        Tool(tool.name, tool.description, tool.input_schema)
        for tool in body.tools or ()
        if isinstance(tool, CustomTool)
    ]
    is_serial = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    output = body.output_config or OutputSettings()
    return prepare_chat(
        model,
        messages,
        tools=tool_use(tools, *body.choice, parallel=not is_serial),
        schema=output.format.json_schema if output.format else None,
        # As chat templates know it.
        reasoning_effort="high" if output.effort in ("xhigh", "max") else output.effort,
        template_kwargs={"enable_thinking": body.thinks},
        reasoning_budget=body.thinking.budget_tokens if body.thinking else None,
        begun=begun,
    )


class _MessageAnswer:
    def __init__(self, loaded: LoadedModel, body: MessagesRequest, chat: PreparedChat) -> None:
        self._loaded = loaded
        self._body = body
        self._task = GenerationTask(chat.prompt, chat.options(body, max_tokens=body.max_tokens))
        self._answer = ChatAnswer(loaded.model, chat)
        is_shown = body.thinking is not None and body.thinking.display != "omitted"
        self._blocks = ContentBlocks(thinking=body.thinks and is_shown)
        self._id = f"msg_{secrets.token_hex(12)}"

    def whole(self) -> dict[str, Any]:
        message = {**self._message(), **self._end(), "usage": self._usage()}
        return {**message, "timings": timings([self._answer.result])}

    async def events(self) -> AsyncIterator[NamedEvent]:
        blocks = self._blocks
        begun = False
        async for _, chunk in stream_all(self._loaded, [self._task]):
            if not begun:
                begun = True
                yield event("message_start", message=self._message())
            for added in self._answer.take(chunk):
                for made in blocks.take(added):
                    yield made
        for made in blocks.close():
            yield made
        costs = {"usage": self._usage(), "timings": timings([self._answer.result])}
        yield event("message_delta", delta=self._end(), **costs)
        yield event("message_stop")

    def _message(self) -> dict[str, Any]:
        """The message without its end, with the part of the prompt that was in a cache."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._loaded.name,
            "content": list(self._blocks.content),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(n_cells(self._task.prompt), cached=0, output=0),
        }

    def _end(self) -> dict[str, Any]:
        """The reason for the message's end."""
        result = self._answer.result
        if self._answer.finish_reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if self._answer.finish_reason == "length":
            is_full = len(result.tokens) < self._body.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        text = result.stopped_by
        return {"stop_reason": "stop_sequence" if text else "end_turn", "stop_sequence": text}

    def _usage(self) -> dict[str, Any]:
        result = self._answer.result
        stats = result.stats
        usage = _usage(stats.prompt_tokens, cached=stats.cached_tokens, output=len(result.tokens))
        details = {"thinking_tokens": self._answer.n_reasoning_tokens}
        return {**usage, "output_tokens_details": details}


def _usage(n_prompt: int, *, cached: int, output: int) -> dict[str, Any]:
    """`input_tokens` are those that were not in the cache."""
    return {
        "input_tokens": n_prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
