"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.api_answer import pool_of, respond
from dflash_local.server.answering.chat_answer import ChatAnswer
from dflash_local.server.answering.generation import tasks_for
from dflash_local.server.answering.prepared_chat import PreparedChat, input_tokens, prepare_chat
from dflash_local.server.answering.tools import tool_use
from dflash_local.server.http.errors import ApiError
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.openai.chat_schema import ChatRequest
from dflash_local.server.openai.choices import ChoicesAnswer

router = APIRouter()

_EVENTS = event_form()


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, `n` times, in one piece or as a stream of chunks."""
    body.check()

    async def begin(loaded: LoadedModel) -> _ChatCompletion:
        return _ChatCompletion(loaded, body, await loaded.threads.run(_prepare, loaded.model, body))

    return await respond(request, body.model, begin, _EVENTS if body.stream else None)


@router.post("/v1/chat/completions/input_tokens")
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def count_input_tokens(request: Request, body: ChatRequest) -> dict[str, Any]:
    """How many tokens the prompt of a conversation has. Nothing is generated."""
    body.check()
    async with pool_of(request).use(body.model) as loaded:
        chat = await loaded.threads.run(_prepare, loaded.model, body)
    return input_tokens(chat.prompt)


def _prepare(model: Model, body: ChatRequest) -> PreparedChat:
    messages, begun = body.conversation
    return prepare_chat(
        model,
        messages,
        tools=tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls),
        schema=body.schema_of_answer,
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs,
        begun=begun,
        begin_answer=body.begins_answer,
    )


class _ChatCompletion(ChoicesAnswer):
    """The answers to one request."""

    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"
    ID_PREFIX = "chatcmpl"

    def __init__(self, loaded: LoadedModel, body: ChatRequest, chat: PreparedChat) -> None:
        options = chat.options(body, max_tokens=body.limit, logprobs=body.n_alternatives)
        if body.bindings and {"lark", "json_schema"} & options.keys():
            raise ApiError(
                400,
                "structured_outputs and tool_choice both bind the answer; give one of them",
                param="structured_outputs",
            )
        tasks = tasks_for(chat.prompt, options | body.bindings, body.n or 1)
        super().__init__(loaded, tasks, per_prompt=len(tasks), body=body)
        self._begun: set[int] = set()
        self._answers = [
            ChatAnswer(
                loaded.model,
                chat,
                logprobs=body.n_alternatives is not None,
                draft_detail=bool(body.draft_detail),
            )
            for _ in tasks
        ]

    def _take(self, index: int, chunk: Chunk) -> None:
        for _ in self._answers[index].take(chunk):
            pass

    def _choice(self, index: int) -> dict[str, Any]:
        answer = self._answers[index]
        return {
            "index": index,
            "message": answer.message(),
            "logprobs": answer.all_logprobs(),
            "finish_reason": answer.finish_reason,
        }

    def _pieces(self, index: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """A role, deltas, and at the end a reason to finish."""
        answer = self._answers[index]
        deltas = list(answer.take(chunk))
        if (deltas or chunk.result) and index not in self._begun:
            self._begun.add(index)
            yield _piece(index, {"role": "assistant", "content": "", "refusal": None})
        for delta in deltas:
            logprobs = answer.take_logprobs()
            yield _piece(index, delta, logprobs) | answer.take_draft_detail(delta)
        if chunk.result is not None:
            last = _piece(index, {}, answer.take_logprobs(), answer.finish_reason)
            yield last | answer.take_draft_detail({})

    def _results(self) -> list[Result]:
        return [answer.result for answer in self._answers]

    def _n_reasoning_tokens(self) -> int:
        return sum(answer.n_reasoning_tokens for answer in self._answers)


def _piece(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return {"choices": [choice]}
