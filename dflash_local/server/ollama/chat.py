"""`/api/chat` and `/api/generate`: https://github.com/ollama/ollama/blob/main/docs/api.md.

How a model is loaded is up to whoever starts the server: options such as `num_ctx` are ignored, and
so is `keep_alive` where the server keeps its only model loaded.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import from_json

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.chat.pictures import MOST_IMAGES
from dflash_local.model import Model
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import answered, pool_of, respond
from dflash_local.server.answering.chat import ChatAnswer, PreparedChat, prepare_chat, split_begun
from dflash_local.server.answering.generation import GenerationTask, stream_all
from dflash_local.server.answering.infill_prompt import (
    Gap,
    infill_prompt,
    infill_room,
    infill_tokens,
)
from dflash_local.server.answering.sampling_fields import SamplingFields, token_limit
from dflash_local.server.answering.tools import FunctionTool, ToolUse, tool_use
from dflash_local.server.http.errors import OllamaErrorBody, bad_request, error_responses
from dflash_local.server.http.event_stream import LINES
from dflash_local.server.models.keep_alive import keep_alive_s
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.ollama.model_list import EXACT_TIME, named, tagged
from dflash_local.target_model.images import Prompt

_REFUSED = {"template": "the model's own chat template is used; leave template out, or give raw"}

_Predict = Annotated[int, Field(strict=True, ge=-2, le=bounds.MAX_INT), bounds.WHOLE]


class OllamaOptions(SamplingFields):
    """`num_predict` -1 and -2 are without limit but the context's."""

    num_predict: _Predict | None = None

    @property
    def limit(self) -> int | None:
        given = self.num_predict
        return None if given == -2 else token_limit("options.num_predict", given)


Think = Annotated[
    Annotated[bounds.Flag, Tag("flag")]
    | Annotated[Literal["low", "medium", "high"], Tag("effort")],
    Discriminator(lambda value: "effort" if isinstance(value, str) else "flag"),
]


def _seconds(given: Any) -> float | None:
    return None if given in (None, "") else keep_alive_s(given)


KeepAlive = Annotated[Any, BeforeValidator(_seconds)]
"""Seconds that the model stays loaded after this request, or a text such as 5m; None: the
server's own."""


class OllamaRequest(BaseModel):
    """Fields of both chats and completions. Answers are streams unless `stream` is false."""

    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    format: Literal["", "json"] | bounds.JsonObject | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    options: OllamaOptions | None = None
    logprobs: bounds.Flag | None = None
    top_logprobs: bounds.TopLogprobs | None = None

    _refuse = bounds.refuse(_REFUSED, unless=(None, False, 0, "", []))

    @property
    def n_alternatives(self) -> int | None:
        """The number to report with each token; None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def sampling(self) -> OllamaOptions:
        return self.options or OllamaOptions()

    @property
    def schema_of_answer(self) -> Any:
        """True for any JSON object, None for free text."""
        return True if self.format == "json" else self.format or None


class OllamaCalledFunction(BaseModel):
    """`arguments` is an object, not a text as with OpenAI."""

    name: bounds.Name
    arguments: bounds.JsonObject = Field(default_factory=dict)


class OllamaToolCall(BaseModel):
    """A call that an earlier answer made."""

    id: bounds.Label | None = None
    function: OllamaCalledFunction


Images = Annotated[bounds.ListOf[bounds.Picture], Field(max_length=MOST_IMAGES)]
"""Pictures in base64."""


def _with_images(text: str, images: list[str] | None) -> Any:
    """A message's content with pictures in front, as Ollama has it."""
    if not images:
        return text
    urls = [image if image.startswith("data:") else f"data:;base64,{image}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}]


class OllamaMessage(BaseModel):
    """`thinking`: the reasoning of an earlier answer. `tool_name`: whose result this is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: bounds.Text | None = None
    thinking: bounds.Text | None = None
    tool_calls: bounds.ToolsOf[OllamaToolCall] | None = None
    tool_name: bounds.Label | None = None
    tool_call_id: bounds.Label | None = None
    images: Images | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        message: dict[str, Any] = {
            "role": self.role,
            "content": _with_images(self.content or "", self.images),
        }
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", **call.model_dump(exclude_none=True)}
                for call in self.tool_calls
            ]
        if self.tool_name:
            message["name"] = self.tool_name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer. Without messages the model is only loaded, or unloaded. A last
    message of the assistant begins the answer, as with Ollama."""

    messages: bounds.MessagesOf[OllamaMessage] = Field(default_factory=list)
    tools: bounds.ToolsOf[FunctionTool] | None = None

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        return [message.for_template() for message in self.messages]


class GenerateRequest(OllamaRequest):
    """A message to answer, or with `raw` a text to go on from, or with `suffix` a gap to fill.
    Without any of them the model is only loaded, or unloaded. `context` are the token ids of an
    earlier answer with all before it, after which the message comes."""

    prompt: bounds.Text | None = None
    suffix: bounds.Text | None = None
    system: bounds.Text | None = None
    raw: bounds.Flag | None = None
    context: bounds.TokenIds | None = None
    images: Images | None = None

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_images(self.prompt or "", self.images)
        return [*system, {"role": "user", "content": content}]


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
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        # Without `think`, models think as their templates have it.
        template_kwargs=None
        if body.think is None
        else {"enable_thinking": body.think is not False},
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
