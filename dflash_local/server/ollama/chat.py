"""`/api/chat` and `/api/generate`: https://github.com/ollama/ollama/blob/main/docs/api.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from dflash_local.chat.plain import Plain
from dflash_local.model import Model
from dflash_local.server.answering.api_answer import answer, pool_of
from dflash_local.server.answering.generation import off_loop, unless_gone
from dflash_local.server.answering.infill_prompt import Gap, infill_prompt
from dflash_local.server.answering.prepared_chat import Conversation, prepare
from dflash_local.server.answering.tools import ToolUse, tool_use
from dflash_local.server.http.errors import ApiError
from dflash_local.server.http.event_stream import LINES
from dflash_local.server.models.served import Served
from dflash_local.server.ollama.answer import (
    OllamaAnswer,
    Shape,
    in_message,
    in_response,
    no_answer,
)
from dflash_local.server.ollama.errors import RESPONSES
from dflash_local.server.ollama.model_list import untagged
from dflash_local.server.ollama.schema import GenerateRequest, OllamaChatRequest, OllamaRequest

router = APIRouter(responses=RESPONSES)

R = TypeVar("R", bound=OllamaRequest)

_ANSWER = 256
"""Tokens kept free for what goes into a gap, at least."""


@router.post("/api/chat")
async def chat(request: Request, body: OllamaChatRequest) -> Response:
    """Answer a conversation, as a stream of lines or in one piece."""
    if not body.messages:
        return await _only_load(request, body, in_message)
    return await _respond(request, body, _conversation, in_message)


@router.post("/api/generate")
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answer a message, go on with a text, or fill a gap; a stream of lines or one piece."""
    if not body.prompt and not body.suffix:
        return await _only_load(request, body, in_response)
    return await _respond(
        request, body, _bare if body.raw or body.suffix else _question, in_response
    )


async def _respond(
    request: Request, body: R, prepared: Callable[[Model, R], Conversation], shape: Shape
) -> Response:
    """The answer to `body`, a stream unless it asks for one piece."""
    begun = time.monotonic()

    async def begin(served: Served) -> OllamaAnswer:
        conversation = await off_loop(prepared, served.model, body)
        return OllamaAnswer(served, body, conversation, shape, begun)

    form = None if body.stream is False else LINES
    name = untagged(request, body.model)
    return await answer(request, name, begin, form, body.keep_alive_s)


async def _only_load(request: Request, body: OllamaRequest, shape: Shape) -> Response:
    """What is asked without a question: to have the model there, or with a `keep_alive` of 0 to
    have it leave."""
    pool = pool_of(request)
    host = pool.find(untagged(request, body.model))
    if body.keep_alive_s == 0 and not pool.is_pinned:
        pool.unload(host.name)
        return no_answer(host.name, shape, "unload")

    async def loaded() -> Response:
        async with pool.use(host.name, body.keep_alive_s) as served:
            return no_answer(served.name, shape, "load")

    return await unless_gone(request, loaded())


def _conversation(model: Model, body: OllamaChatRequest) -> Conversation:
    return prepare(
        model,
        [message.shown() for message in body.messages],
        tools=tool_use(body.tools, None, parallel=None),
        schema=body.schema_of_answer,
        reasoning_effort=body.effort,
        template_kwargs=body.template_kwargs,
    )


def _question(model: Model, body: GenerateRequest) -> Conversation:
    messages = [{"role": "user", "content": body.prompt or ""}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return prepare(
        model,
        messages,
        schema=body.schema_of_answer,
        reasoning_effort=body.effort,
        template_kwargs=body.template_kwargs,
    )


def _bare(model: Model, body: GenerateRequest) -> Conversation:
    """A prompt without a chat around it. What comes back is all content."""
    vocabulary, prompt = model.target.vocabulary, body.prompt or ""
    if body.suffix:
        if vocabulary.infill is None:
            raise ApiError(
                400,
                "this model has no tokens to fill a gap with; leave out suffix, or take a model "
                "that was taught to, as coders are",
                param="suffix",
            )
        wanted = max(body.sampling.limit or 0, _ANSWER)
        room = model.n_ctx - min(wanted, model.n_ctx // 2)
        tokens = infill_prompt(vocabulary, Gap(prompt, body.suffix), room=room)
    else:
        tokens = vocabulary.tokenize(prompt, n_ctx=model.n_ctx)
    schema = body.schema_of_answer
    options: dict[str, Any] = {} if schema is None else {"json_schema": schema}
    return Conversation(tokens, options, Plain(), ToolUse(), False)
