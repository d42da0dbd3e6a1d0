"""`/api/chat` and `/api/generate`: https://github.com/ollama/ollama/blob/main/docs/api.md."""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import from_json

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.model import Model
from dflash_local.server.answering.api_answer import answered, pool_of, respond
from dflash_local.server.answering.chat import ChatAnswer, PreparedChat, prepare_chat, split_begun
from dflash_local.server.answering.generation import GenerationTask, stream_all
from dflash_local.server.answering.infill_prompt import (
    Gap,
    infill_prompt,
    infill_room,
    infill_tokens,
)
from dflash_local.server.answering.tools import ToolUse, tool_use
from dflash_local.server.http.errors import OllamaErrorBody, bad_request, error_responses
from dflash_local.server.http.event_stream import LINES
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.ollama.model_list import EXACT_TIME, named, tagged
from dflash_local.server.ollama.schema import GenerateRequest, OllamaChatRequest, OllamaRequest
from dflash_local.target_model.images import Prompt

OllamaShape = Callable[[Mapping[str, Any]], dict[str, Any]]
"""From `content`, `thinking` and `tool_calls` to the fields of a route that hold them."""


def in_message(piece: Mapping[str, Any]) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": "", **piece}}


def in_response(piece: Mapping[str, Any]) -> dict[str, Any]:
    thinking = {"thinking": piece["thinking"]} if "thinking" in piece else {}
    return {"response": piece.get("content", ""), **thinking}


def no_answer(name: str, shape: OllamaShape, reason: Literal["load", "unload"]) -> Response:
    """To a request that only wants the model of that name to be loaded or unloaded."""
    return JSONResponse({**_head(name), **shape({}), "done_reason": reason, "done": True})


class OllamaAnswer:
    """The answer to one request, which arrived at `arrived`, by `time.monotonic`."""

    def __init__(
        self,
        loaded: LoadedModel,
        body: OllamaRequest,
        chat: PreparedChat,
        shape: OllamaShape,
        arrived: float,
    ) -> None:
        self._arrived = arrived
        self._loaded_at = time.monotonic()
        self._loaded = loaded
        self._shape = shape
        sampling = body.sampling
        n_logprobs = body.n_alternatives
        options = chat.options(sampling, max_tokens=sampling.limit, logprobs=n_logprobs)
        self._task = GenerationTask(chat.prompt, options)
        self._answer = ChatAnswer(loaded.model, chat, logprobs=n_logprobs is not None)
        self._tells_context = isinstance(body, GenerateRequest) and not body.raw
        self._thinking = body.think is not False
        self._call: dict[str, Any] | None = None
        self._calls: list[dict[str, Any]] = []
        """Those that are complete."""

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """A line for each piece, and one with the costs."""
        async for piece in self._pieces():
            told = self._logprobs(self._answer.logprobs.take())
            yield {**_head(self._loaded.name), **self._shape(piece), **told, "done": False}
        told = self._logprobs(self._answer.logprobs.take())
        yield {**_head(self._loaded.name), **self._shape({}), **told, **self._end()}

    def whole(self) -> dict[str, Any]:
        answer = self._answer
        message: dict[str, Any] = {"content": answer.content}
        if answer.thoughts and self._thinking:
            message["thinking"] = "".join(answer.thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        told = self._logprobs(answer.logprobs.all())
        return {**_head(self._loaded.name), **self._shape(message), **told, **self._end()}

    @staticmethod
    def _logprobs(told: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"logprobs": told["content"]} if told else {}

    async def _pieces(self) -> AsyncIterator[dict[str, Any]]:
        async for _, chunk in stream_all(self._loaded, [self._task]):
            for event in self._answer.take(chunk):
                for piece in self._pieces_of(event):
                    yield piece
        for piece in self._close_call():
            yield piece

    def _pieces_of(self, event: Event) -> Iterator[dict[str, Any]]:
        """The pieces that an event adds to the message. A call comes once it is complete."""
        match event:
            case Reasoning(text):
                if self._thinking:
                    yield {"thinking": text}
            case Content(text):
                yield from self._close_call()
                yield {"content": text}
            case ToolCallStart(_, id, name):
                yield from self._close_call()
                self._call = {"id": id, "name": name, "arguments": ""}
            case ToolCallArguments(_, text) if self._call is not None:
                self._call["arguments"] += text

    def _close_call(self) -> Iterator[dict[str, Any]]:
        """The open call, if there is one. A call that was cut off is left out."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            arguments = from_json(call["arguments"], allow_inf_nan=False)
        except ValueError:
            return
        function = {"index": len(self._calls), "name": call["name"], "arguments": arguments}
        self._calls.append({"id": call["id"], "function": function})
        yield {"tool_calls": self._calls[-1:]}

    def _end(self) -> dict[str, Any]:
        """The reason for the answer's end, and its costs: times in nanoseconds. `load_duration` is
        the time until the model was loaded and had a slot for the request."""
        result = self._answer.result
        stats = result.stats
        # The ids of images mean nothing without their files.
        tells = self._tells_context and not isinstance(self._task.prompt, Prompt)
        context = {"context": self._task.prompt + result.tokens} if tells else {}
        return {
            "done": True,
            **context,
            "done_reason": result.finish_reason,
            "total_duration": _ns(time.monotonic() - self._arrived),
            "load_duration": _ns(self._loaded_at - self._arrived + stats.queue_s),
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": _ns(stats.prompt_s),
            "eval_count": len(result.tokens),
            "eval_duration": _ns(stats.decode_s),
        }


def _head(name: str) -> dict[str, Any]:
    return {"model": tagged(name), "created_at": f"{datetime.now(timezone.utc):{EXACT_TIME}}"}


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


router = APIRouter(responses=error_responses(OllamaErrorBody))

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
