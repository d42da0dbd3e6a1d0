"""`/api/chat` and `/api/generate`: https://github.com/ollama/ollama/blob/main/docs/api.md."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from dflash_local.chat.dialect import Dialect
from dflash_local.model import Model
from dflash_local.server.answering.api_answer import answered, pool_of, respond
from dflash_local.server.answering.infill_prompt import (
    Gap,
    infill_prompt,
    infill_room,
    infill_tokens,
)
from dflash_local.server.answering.prepared_chat import PreparedChat, prepare_chat, split_begun
from dflash_local.server.answering.tools import ToolUse, tool_use
from dflash_local.server.http.errors import bad_request
from dflash_local.server.http.event_stream import LINES
from dflash_local.server.ollama.answer import (
    OllamaAnswer,
    OllamaShape,
    in_message,
    in_response,
    no_answer,
)
from dflash_local.server.ollama.errors import RESPONSES
from dflash_local.server.ollama.model_list import named
from dflash_local.server.ollama.schema import GenerateRequest, OllamaChatRequest, OllamaRequest
from dflash_local.target_model.images import Prompt

router = APIRouter(responses=RESPONSES)

R = TypeVar("R", bound=OllamaRequest)


@router.post("/api/chat")
async def chat(request: Request, body: OllamaChatRequest) -> Response:
    """Answer a conversation, as a stream of lines or in one piece."""
    if not body.messages:
        return await _only_load(request, body, in_message)
    return await _respond(request, body, _prepare_chat, in_message)


@router.post("/api/generate")
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answer a message, go on from a text, or fill a gap; as a stream of lines or in one piece."""
    if not body.prompt and not body.suffix:
        return await _only_load(request, body, in_response)
    prepare = _prepare_text if body.raw or body.suffix else _prepare_chat
    return await _respond(request, body, prepare, in_response)


async def _respond(
    request: Request, body: R, prepare: Callable[[Model, R], PreparedChat], shape: OllamaShape
) -> Response:
    """The answer to `body`, a stream unless it asks for one piece."""
    answer = partial(OllamaAnswer, shape=shape, arrived=time.monotonic())
    form = None if body.stream is False else LINES
    name = named(request, body.model)
    return await respond(request, name, body, prepare, answer, form, body.keep_alive)


async def _only_load(request: Request, body: OllamaRequest, shape: OllamaShape) -> Response:
    """The answer to a request without a question: it loads the model, or with a `keep_alive` of 0
    unloads it."""
    pool = pool_of(request)
    served = pool.find(named(request, body.model), "chat")
    if body.keep_alive == 0 and not pool.is_pinned:
        pool.unload(served.name)
        return no_answer(served.name, shape, "unload")

    async def load() -> Response:
        async with pool.use(served.name, body.keep_alive) as loaded:
            return no_answer(loaded.name, shape, "load")

    return await answered(request, load())


def _prepare_chat(model: Model, body: OllamaChatRequest | GenerateRequest) -> PreparedChat:
    given = body.tools if isinstance(body, OllamaChatRequest) else None
    tools = [tool.function.tool for tool in given or ()]
    messages, begun = split_begun(body.chat_messages)
    chat = prepare_chat(
        model,
        messages,
        tools=tool_use(tools),
        schema=body.schema_of_answer,
        reasoning_effort=body.effort,
        template_kwargs=body.template_kwargs,
        begun=begun,
    )
    if isinstance(body, GenerateRequest) and body.context:
        if isinstance(chat.prompt, Prompt):
            return replace(chat, prompt=chat.prompt.behind(body.context))
        return replace(chat, prompt=[*body.context, *chat.prompt])
    return chat


def _prepare_text(model: Model, body: GenerateRequest) -> PreparedChat:
    """A prompt without a chat around it: all of the answer is content."""
    vocabulary, prompt = model.target.vocabulary, body.prompt or ""
    if body.images:
        raise bad_request(
            "a raw prompt, or one with a suffix, has no place for images", param="images"
        )
    if body.suffix:
        infill_tokens(vocabulary)  # raises ApiError for a model that cannot fill gaps
        room = infill_room(model.n_ctx, body.sampling.limit or 0)
        tokens = infill_prompt(vocabulary, Gap(prompt, body.suffix), room=room)
    else:
        tokens = vocabulary.tokenize(prompt, n_ctx=model.n_ctx)
    schema = body.schema_of_answer
    bindings: dict[str, Any] = {} if schema is None else {"json_schema": schema}
    return PreparedChat(tokens, {}, bindings, Dialect(), ToolUse(), False)
