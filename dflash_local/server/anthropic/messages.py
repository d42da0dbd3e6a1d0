"""`/v1/messages`: https://platform.claude.com/docs/en/api/messages."""

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from dflash_local.chat.conversation import complete_fields
from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.model import Model
from dflash_local.server.answering.api_answer import on_model, respond
from dflash_local.server.answering.chat import ChatAnswer, PreparedChat, prepare_chat, split_begun
from dflash_local.server.answering.generation import GenerationTask, stop_text, stream_all, timings
from dflash_local.server.answering.tools import tool_use
from dflash_local.server.anthropic.schema import CountRequest, MessagesRequest
from dflash_local.server.http.errors import AnthropicErrorBody, error_responses
from dflash_local.server.http.event_stream import NamedEvent, event_form
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.target_model.images import n_cells


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
    return prepare_chat(
        model,
        messages,
        tools=tool_use(body.functions, *body.choice, parallel=body.parallel),
        schema=body.schema_of_answer,
        reasoning_effort=body.effort,
        template_kwargs={"enable_thinking": body.thinks},
        reasoning_budget=body.thinking.budget_tokens if body.thinking else None,
        begun=begun,
    )


class _MessageAnswer:
    def __init__(self, loaded: LoadedModel, body: MessagesRequest, chat: PreparedChat) -> None:
        self._loaded = loaded
        self._body = body
        self._dialect = chat.dialect
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
        vocabulary = self._loaded.model.target.vocabulary
        text = stop_text(vocabulary, result, self._body.stop_texts, special=self._dialect.special)
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
