"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from dflash_local.model import Model
from dflash_local.server.answering.api_answer import answer
from dflash_local.server.answering.chat_answer import ChatAnswer
from dflash_local.server.answering.generation import Task, choices, off_loop, stream_all
from dflash_local.server.answering.prepared_chat import Conversation, prepare
from dflash_local.server.answering.sampling_fields import sampling_options
from dflash_local.server.answering.tools import tool_use
from dflash_local.server.answering.usage import timings, usage
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.models.served import Served
from dflash_local.server.openai.chat_schema import ChatRequest
from dflash_local.server.openai.envelope import envelope
from dflash_local.server.openai.response_format import schema_of

router = APIRouter()

_EVENTS = event_form()


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, `n` times over, in one piece or as a stream of chunks."""
    body.check()

    async def begin(served: Served) -> _Completion:
        conversation = await off_loop(_prepare, served.model, body)
        return _Completion(served, body, conversation)

    return await answer(request, body.model, begin, _EVENTS if body.stream else None)


def _prepare(model: Model, body: ChatRequest) -> Conversation:
    schema = schema_of(body.response_format)
    return prepare(
        model,
        [message.shown() for message in body.messages],
        tools=tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls),
        schema=body.json_schema if schema is None else schema,
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs,
    )


def _options(body: ChatRequest, conversation: Conversation) -> dict[str, Any]:
    options = {**sampling_options(body), **conversation.options, "max_tokens": body.limit}
    if conversation.dialect.stop:
        options["stop"] = (*body.stop_texts, *conversation.dialect.stop)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    return options


class _Completion:
    """The answers to one request."""

    def __init__(self, served: Served, body: ChatRequest, conversation: Conversation) -> None:
        self._served = served
        self._body = body
        options = _options(body, conversation)
        self._tasks: list[Task] = choices(conversation.prompt, options, body.n or 1)
        self._answers = [
            ChatAnswer(
                served.model,
                conversation,
                logprobs=bool(body.logprobs),
                draft_detail=bool(body.draft_detail),
            )
            for _ in self._tasks
        ]

    async def whole(self) -> Response:
        head = envelope(self._served, "chat.completion", prefix="chatcmpl")
        async for _ in self._deltas():
            pass
        return await off_loop(self._told, head)

    def _told(self, head: dict[str, Any]) -> Response:
        """The whole answer. With log-probabilities it is long, and takes its time to be written."""
        told = [
            {
                "index": index,
                "message": answer.message(),
                "logprobs": answer.all_logprobs(),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(self._answers)
        ]
        return JSONResponse({**head, "choices": told, **self._costs()})

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """A role, deltas and a reason to finish for each answer; the costs in the last chunk."""
        head = envelope(self._served, "chat.completion.chunk", prefix="chatcmpl")
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        no_usage = {"usage": None} if wants_usage else {}
        left = len(self._tasks)
        begun: set[int] = set()
        async for index, delta in self._deltas():
            answer = self._answers[index]
            if index not in begun:
                begun.add(index)
                role = {"role": "assistant", "content": "", "refusal": None}
                yield {**head, "choices": [_choice(index, role)], **no_usage}
            if delta is not None:
                chunk = _choice(index, delta, logprobs=answer.take_logprobs())
                drafts = answer.take_draft_detail(delta)
                yield {**head, "choices": [chunk], **no_usage, **drafts}
                continue
            left -= 1
            last = _choice(index, {}, answer.take_logprobs(), answer.finish_reason)
            costs = {} if left or wants_usage else {"timings": self._timings()}
            drafts = answer.take_draft_detail({})
            yield {**head, "choices": [last], **no_usage, **drafts, **costs}
        if wants_usage:
            yield {**head, "choices": [], **self._costs()}

    async def _deltas(self) -> AsyncIterator[tuple[int, dict[str, Any] | None]]:
        """What each chunk adds to its answer; None once that is complete."""
        async for index, chunk in stream_all(self._served, self._tasks):
            answer = self._answers[index]
            for delta in answer.take(chunk):
                yield index, delta
            if chunk.result is not None:
                yield index, None

    def _costs(self) -> dict[str, Any]:
        results = [answer.result for answer in self._answers]
        reasoning = sum(answer.n_reasoning_tokens for answer in self._answers)
        told = usage(results, per_prompt=len(results), reasoning_tokens=reasoning)
        return {"usage": told, "timings": self._timings()}

    def _timings(self) -> dict[str, Any]:
        return timings([answer.result for answer in self._answers])


def _choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
