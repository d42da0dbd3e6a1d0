"""`/v1/responses`: https://platform.openai.com/docs/api-reference/responses.

Nothing is stored: the answer says `store: false`, and requests that need a stored response are
refused. Tools that OpenAI runs itself, such as its web search, are not shown to the model, nor
listed in the answer.
"""

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, Tag

from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.model import Model
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import on_model, respond
from dflash_local.server.answering.chat import (
    ChatAnswer,
    PreparedChat,
    input_tokens,
    prepare_chat,
    split_begun,
)
from dflash_local.server.answering.generation import GenerationTask, stream_all, timings
from dflash_local.server.answering.sampling_fields import SamplingFields, usual_sampling
from dflash_local.server.answering.tools import (
    Arguments,
    Choice,
    Function,
    HostedTool,
    ToolName,
    tool_use,
)
from dflash_local.server.http.errors import REFUSED, api_error, bad_request
from dflash_local.server.http.event_stream import NamedEvent, event_form
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.openai.chat import Contents
from dflash_local.server.openai.choices import JsonObjectFormat, TextFormat

_STORED = "nothing is stored here; send the whole conversation as input, and leave {} out"
_REFUSED = {
    "previous_response_id": _STORED.format("previous_response_id"),
    "conversation": _STORED.format("conversation"),
    "prompt": _STORED.format("prompt"),
    "background": "there are no background answers here; leave background out",
}


class InputMessage(BaseModel):
    """A message; one of the assistant is an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents


class FunctionCall(BaseModel):
    """A call that an earlier answer made; `arguments` is a JSON text."""

    type: Literal["function_call"]
    call_id: bounds.Label
    name: bounds.Name
    arguments: Arguments


class FunctionCallOutput(BaseModel):
    """The called function's result."""

    type: Literal["function_call_output"]
    call_id: bounds.Label
    output: Contents


class ReasoningText(BaseModel):
    text: bounds.Text


class ReasoningItem(BaseModel):
    """The reasoning of an earlier answer; templates that know it show it."""

    type: Literal["reasoning"]
    content: bounds.MessagesOf[ReasoningText] | None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind(value: Any) -> str | None:
    kind = bounds.field_of(value, "type")
    if kind is None and isinstance(value, dict) and "type" not in value:
        return "message"
    return kind if kind in _KINDS else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type=REFUSED,
        custom_error_message=f"an item is an object with a type, one of {', '.join(_KINDS)}",
    ),
]


class FunctionOfResponses(Function):
    type: Literal["function"]


ToolOfResponses = Annotated[
    Annotated[FunctionOfResponses, Tag("function")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(
        lambda value: "function" if bounds.field_of(value, "type") == "function" else "hosted"
    ),
]


class NamedChoice(BaseModel):
    type: Literal["function"]
    name: ToolName


class NamedSchemaFormat(BaseModel):
    """JSON of a schema: always strictly, whatever `strict` says."""

    type: Literal["json_schema"]
    name: bounds.Label | None = None
    json_schema: bounds.JsonObject = Field(default_factory=dict, alias="schema")


class TextSettings(BaseModel):
    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")]
        | None
    ) = None

    @property
    def schema_of_answer(self) -> Any:
        """True for any JSON object, None for free text."""
        given = self.format
        if given is None or isinstance(given, TextFormat):
            return None
        return given.json_schema or True


class ReasoningSettings(BaseModel):
    effort: bounds.Label | None = None


_Metadata = Annotated[dict[bounds.Label, bounds.Label], Field(max_length=16), bounds.Few]


class ResponsesRequest(SamplingFields):
    """A text or a conversation to answer. A server of one model takes any model name; the answer
    has the server's own."""

    input: bounds.TextOr[bounds.SomeMessagesOf[InputItem]]
    instructions: bounds.Text | None = None
    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    max_output_tokens: bounds.MaxTokens | None = None
    tools: bounds.ToolsOf[ToolOfResponses] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bounds.Flag | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Annotated[bounds.ListOf[bounds.Label], Field(max_length=64)] | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    metadata: _Metadata | None = None
    chat_template_kwargs: bounds.JsonObject | None = None

    _refuse = bounds.refuse(
        _REFUSED,
        unless=(None, False),
        codes={"previous_response_id": "previous_response_not_found"},
    )

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def functions(self) -> list[FunctionOfResponses]:
        """The tools that the model can call."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionOfResponses)]

    @property
    def choice(self) -> Choice:
        given = self.tool_choice
        if isinstance(given, NamedChoice):
            return "required", [given.name]
        return given or "auto", None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it: one message for each turn of the
        assistant."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, FunctionCallOutput):
                content = _for_template(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            elif isinstance(item, FunctionCall):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _turn(messages).setdefault("tool_calls", []).append(call)
            elif isinstance(item, ReasoningItem):
                if item.content:
                    thought = "".join(part.text for part in item.content)
                    _turn(messages, "reasoning_content")["reasoning_content"] = thought
            elif item.role == "assistant":
                _turn(messages, "content")["content"] = _for_template(item.content)
            else:
                messages.append({"role": item.role, "content": _for_template(item.content)})
        for message in messages:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        return messages


def _turn(messages: list[dict[str, Any]], field: str | None = None) -> dict[str, Any]:
    """The assistant's message that can still get `field`, or a new one.

    Reasoning comes before content, content before calls.
    """
    order = ("reasoning_content", "content", "tool_calls")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is not None:
        later = order[order.index(field) :] if field else ()
        if all(last.get(name) is None for name in later):
            return last
    messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _for_template(content: Any) -> Any:
    return content if isinstance(content, str) else [part.model_dump() for part in content]


class ResponseItems:
    """The output items of a response and their events, while the answer arrives: the events of a
    chat's answer come in. Each run of reasoning, each run of text and each call becomes an item: it
    is added, grows, and is done before the next one is added.

    `output` has the items so far, as the whole response has them.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self.n_events = 0

    def event(self, name: str, /, **data: Any) -> NamedEvent:
        """The next event; events are numbered."""
        event = NamedEvent(name, {"type": name, "sequence_number": self.n_events, **data})
        self.n_events += 1
        return event

    def take(
        self, event: Event, logprobs: list[dict[str, Any]] | None = None
    ) -> Iterator[NamedEvent]:
        match event:
            case Reasoning(text):
                yield from self._text("reasoning", text, None)
            case Content(text):
                yield from self._text("message", text, logprobs)
            case ToolCallStart(_, call_id, name):
                yield from self.close()
                item = {
                    "id": _id("fc"),
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call_id,
                    "name": name,
                    "arguments": "",
                }
                yield from self._add(item)
            case ToolCallArguments(_, text) if self._open is not None:
                self._open["arguments"] += text
                name = "response.function_call_arguments.delta"
                yield self.event(name, **self._where(self._open), delta=text)

    def close(self, status: str = "completed") -> Iterator[NamedEvent]:
        """The events that end the open item; `status` is "incomplete" for an answer cut off."""
        item = self._open
        if item is None:
            return
        self._open = None
        item["status"] = status
        where = self._where(item)
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield self.event(
                "response.function_call_arguments.done", **where, name=name, arguments=arguments
            )
        else:
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            where["content_index"] = 0
            kind = f"response.{part['type']}.done"
            yield self.event(kind, **where, text=part["text"], **logprobs)
            yield self.event("response.content_part.done", **where, part=dict(part))
        yield self._item("response.output_item.done", item)

    def _text(
        self, kind: str, text: str, logprobs: list[dict[str, Any]] | None
    ) -> Iterator[NamedEvent]:
        item = self._open
        if item is None or item["type"] != kind:
            yield from self.close()
            item, first = _text_item(kind)
            yield from self._add(item)
            item["content"].append(first)
            yield self.event(
                "response.content_part.added",
                **self._where(item),
                content_index=0,
                part=_snapshot(first),
            )
        part = item["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += logprobs or []
            more["logprobs"] = logprobs or []
        name = f"response.{part['type']}.delta"
        yield self.event(name, **self._where(item), content_index=0, delta=text, **more)

    def _add(self, item: dict[str, Any]) -> Iterator[NamedEvent]:
        self._open = item
        self.output.append(item)
        yield self._item("response.output_item.added", item)

    def _item(self, name: str, item: Mapping[str, Any]) -> NamedEvent:
        return self.event(name, output_index=len(self.output) - 1, item=_snapshot(item))

    def _where(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.output) - 1}


def _snapshot(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that keeps its lists while the original's grow."""
    return {name: list(v) if isinstance(v, list) else v for name, v in fields.items()}


def _text_item(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An item without content, and the first part of its content."""
    item: dict[str, Any]
    part: dict[str, Any]
    if kind == "message":
        item = {"id": _id("msg"), "type": kind, "role": "assistant"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    else:
        item = {"id": _id("rs"), "type": kind, "summary": []}
        part = {"type": "reasoning_text", "text": ""}
    return item | {"status": "in_progress", "content": []}, part


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


router = APIRouter()

_EVENTS = event_form(done=None)


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a text or a conversation, in one piece or as a stream of named events."""
    form = _EVENTS if body.stream else None
    return await respond(request, body.model, body, _prepare, _ResponseAnswer, form)


@router.post("/v1/responses/input_tokens")
@router.post("/responses/input_tokens", include_in_schema=False)
async def count_input_tokens(request: Request, body: ResponsesRequest) -> dict[str, Any]:
    """Count the tokens of the prompt of a text or a conversation. Nothing is generated."""
    return input_tokens(await on_model(request, body.model, body, _prepare))


def _prepare(model: Model, body: ResponsesRequest) -> PreparedChat:
    tools = [function.tool for function in body.functions]
    messages, begun = body.messages(), ""
    if not messages:
        raise bad_request("the input has no message; give one of the user", param="input")
    if not messages[-1].get("reasoning_content"):  # else it is whole: no template leaves one open
        messages, begun = split_begun(messages)
    return prepare_chat(
        model,
        messages,
        tools=tool_use(tools, *body.choice, parallel=body.parallel_tool_calls),
        schema=body.text.schema_of_answer if body.text else None,
        reasoning_effort=body.effort,
        template_kwargs=body.chat_template_kwargs,
        begun=begun,
    )


class _ResponseAnswer:
    def __init__(self, loaded: LoadedModel, body: ResponsesRequest, chat: PreparedChat) -> None:
        self._loaded = loaded
        self._body = body
        n_alternatives = (body.top_logprobs or 0) if body.wants_logprobs else None
        options = chat.options(body, max_tokens=body.max_output_tokens, logprobs=n_alternatives)
        self._task = GenerationTask(chat.prompt, options)
        self._answer = ChatAnswer(loaded.model, chat, logprobs=body.wants_logprobs)
        self._items = ResponseItems()
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())

    def whole(self) -> dict[str, Any]:
        return self._response()

    async def events(self) -> AsyncIterator[NamedEvent]:
        """All events. In a stream an error after the first of them becomes the last one."""
        try:
            async for event in self._all_events():
                yield event
        except Exception as error:
            if not (self._items.n_events and self._body.stream):
                raise
            fault = api_error(error)
            yield self._items.event(
                "error", code=fault.code, message=fault.message, param=fault.param
            )

    async def _all_events(self) -> AsyncIterator[NamedEvent]:
        items = self._items
        async for _, chunk in stream_all(self._loaded, [self._task]):
            if not items.n_events:
                for name in ("created", "in_progress"):
                    yield items.event(f"response.{name}", response=self._response("in_progress"))
            for event in self._answer.take(chunk):
                for told in items.take(event, self._logprobs()):
                    yield told
        for told in items.close(self._status):
            yield told
        yield items.event(f"response.{self._status}", response=self._response())

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _logprobs(self) -> list[dict[str, Any]] | None:
        logprobs = self._answer.logprobs.take()
        return logprobs["content"] if logprobs else None

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """The response: whole, or with the `status` "in_progress" without output and costs."""
        body, choice = self._body, self._body.tool_choice
        given = (body.text and body.text.format) or TextFormat(type="text")
        options = {**usual_sampling(self._loaded.model), **self._task.options}
        done = status is None
        status = status or self._status
        cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
        fields: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "error": None,
            "incomplete_details": cut_off,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._loaded.name,
            "output": self._items.output if done else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": False,
            "temperature": options["temperature"],
            "text": {"format": given.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump()
            if isinstance(choice, NamedChoice)
            else choice or "auto",
            "tools": [{**function.model_dump(), "strict": True} for function in body.functions],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": options["top_p"],
            "truncation": "disabled",
            "usage": self._usage() if done else None,
        }
        return {**fields, "timings": timings([self._answer.result])} if done else fields

    def _usage(self) -> dict[str, Any]:
        result = self._answer.result
        n_input, n_output = result.stats.prompt_tokens, len(result.tokens)
        cached = result.stats.cached_tokens
        return {
            "input_tokens": n_input,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": n_input - cached,
            },
            "output_tokens": n_output,
            "output_tokens_details": {"reasoning_tokens": self._answer.n_reasoning_tokens},
            "total_tokens": n_input + n_output,
        }
