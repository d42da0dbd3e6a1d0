"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat.

Fields that a text model cannot serve are refused where ignoring them would change the meaning of
the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, Discriminator, Tag, model_validator
from pydantic_core import PydanticCustomError

from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.chat.reader import call_of
from dflash_local.model import Model
from dflash_local.origins import Origin, Origins
from dflash_local.result import Chunk
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import on_model, respond
from dflash_local.server.answering.chat import (
    ChatAnswer,
    PreparedChat,
    input_tokens,
    prepare_chat,
    split_begun,
)
from dflash_local.server.answering.generation import tasks_for
from dflash_local.server.answering.sampling_fields import token_limit
from dflash_local.server.answering.tools import (
    AllowedToolsChoice,
    Choice,
    FunctionTool,
    NamedTool,
    ToolCall,
    ToolChoice,
    tool_use,
)
from dflash_local.server.http.errors import REFUSED, bad_request
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.openai.choices import ChoicesAnswer, ChoicesRequest

_REFUSED = {
    "functions": "functions are OpenAI's old way to give tools; give `tools`",
    "function_call": "function_call is OpenAI's old way to ask for a tool; give `tool_choice`",
    "audio": "this server makes no audio; leave it out",
    "web_search_options": "this server does not search the web; leave web_search_options out",
}


class TextPart(BaseModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: bounds.Text

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "refusal":
            return {"type": "text", "text": given.get("refusal")}
        if isinstance(kind, str):
            return {**given, "type": "text"}
        return given


class ImageUrl(BaseModel):
    """A picture as a data URI, or its address, if the server may fetch that."""

    url: bounds.Picture

    @model_validator(mode="before")
    @classmethod
    def _or_alone(cls, given: Any) -> Any:
        return {"url": given} if isinstance(given, str) else given


class ImagePart(BaseModel):
    """A picture in a message; as OpenAI's Responses have it, `input_image` with the address as a
    text."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl


_TEXTS = ("text", "input_text", "output_text", "refusal")
_IMAGES = ("image_url", "input_image")


def _known(part: Any) -> Any:
    """Refuses a part of another kind, and names it."""
    kind = bounds.field_of(part, "type")
    if isinstance(kind, str) and kind not in (*_TEXTS, *_IMAGES):
        raise PydanticCustomError(
            REFUSED,
            "models read text and images here; they take no part of type {kind}",
            {"kind": kind[:64]},
        )
    return part


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[ImagePart, Tag("image")],
    Discriminator(lambda value: "image" if bounds.field_of(value, "type") in _IMAGES else "text"),
    BeforeValidator(_known),
]
Contents = Annotated[
    bounds.TextOr[bounds.SomeMessagesOf[Part]],
    BeforeValidator(lambda given: "" if given == [] else given),  # what said nothing
]


class ChatMessage(BaseModel):
    """The fields of all messages."""

    name: bounds.Label | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        return {"content": None, **self.model_dump(exclude_none=True)}


class PlainMessage(ChatMessage):
    """Of the user, the system, or of a role that only the model's template knows."""

    role: bounds.Name
    content: Contents


class AssistantMessage(ChatMessage):
    """`reasoning_content` is that of an earlier answer; templates that know it show it."""

    role: Literal["assistant"]
    content: Contents | None = None
    reasoning_content: bounds.Text | None = None
    reasoning: bounds.Text | None = None
    refusal: bounds.Text | None = None
    tool_calls: bounds.ToolsOf[ToolCall] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            self.content = self.refusal or ""
        return self


class ToolMessage(ChatMessage):
    role: Literal["tool"]
    content: Contents
    tool_call_id: bounds.Label | None = None


_OWN_FORMS = ("assistant", "tool")


def _form(message: Any) -> str:
    role = bounds.field_of(message, "role")
    return role if role in _OWN_FORMS else "plain"


AnyMessage = Annotated[
    Annotated[PlainMessage, Tag("plain")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    Discriminator(_form),
]


class ChatRequest(ChoicesRequest):
    """A conversation to answer. A server of one model takes any model name; the answer has the
    server's own.

    `draft_detail` adds a field of that name to each chunk of a stream: the pieces of its text that
    were accepted drafts, the tokens of each verify pass, and why the controller drafts or does not.
    A last message of the assistant begins the answer, as with llama-server, unless
    `continue_final_message` is false. Without `add_generation_prompt` the prompt ends with it. With
    a `reasoning_format` of "none", llama-server's, thoughts stay in the content. After
    `reasoning_budget_tokens`, also called `thinking_budget_tokens` and `reasoning_budget`, thoughts
    are ended; -1 is no limit. `verbose` adds the prompt that the chat template has written, as
    llama-server has it.
    """

    messages: bounds.SomeMessagesOf[AnyMessage]
    draft_detail: bounds.Flag | None = None
    max_completion_tokens: bounds.Predict | None = None
    logprobs: bounds.Flag | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    tools: bounds.ToolsOf[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bounds.Flag | None = None
    reasoning_effort: bounds.Label | None = None
    reasoning_budget_tokens: bounds.Predict | None = None
    thinking_budget_tokens: bounds.Predict | None = None
    reasoning_budget: bounds.Predict | None = None
    reasoning_budget_message: bounds.Label | None = None
    chat_template_kwargs: bounds.JsonObject | None = None
    add_generation_prompt: bounds.Flag | None = None
    continue_final_message: bounds.Flag | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None
    verbose: bounds.Flag | None = None
    modalities: bounds.ListOf[bounds.Label] | None = None

    _refuse = bounds.refuse(_REFUSED, unless=(None, [], "none", "auto"))

    @property
    def limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return token_limit("max_completion_tokens", self.max_completion_tokens)
        return super().limit

    @property
    def n_alternatives(self) -> int | None:
        """The number to report with each token; None for no log-probabilities."""
        if self.logprobs:
            return self.top_logprobs or self.n_probs or 0
        return self.n_probs or None

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt goes on after the last message with the beginning of another."""
        return self.add_generation_prompt is not False or bool(self.continue_final_message)

    @property
    def choice(self) -> Choice:
        given = self.tool_choice
        if isinstance(given, NamedTool):
            return "required", [given.function.name]
        if isinstance(given, AllowedToolsChoice):
            allowed = given.allowed_tools
            return allowed.mode, [tool.function.name for tool in allowed.tools]
        return given or "auto", None

    def check(self) -> None:
        super().check()
        is_asked = self.continue_final_message is None and self.begins_answer
        last_two = [each for each in self.messages[-2:] if isinstance(each, AssistantMessage)]
        # As llama-server, which refuses to go on with the second of two answers without calls.
        if is_asked and sum(not each.tool_calls for each in last_two) == 2:
            raise bad_request(
                "the last two messages are both of the assistant, so which of them begins the "
                "answer is not clear; join them, or set continue_final_message",
                param="messages",
            )
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise bad_request(
                    "continue_final_message and add_generation_prompt contradict each other; leave "
                    "out one of the two",
                    param="continue_final_message",
                )
            last = self.messages[-1]
            if not isinstance(last, AssistantMessage) or last.tool_calls or len(self.messages) < 2:
                raise bad_request(
                    "continue_final_message needs a last message of the assistant with text, after "
                    "one of the user",
                    param="continue_final_message",
                )
        if self.draft_detail and not self.stream:
            raise bad_request("draft_detail is for streams; set stream", param="draft_detail")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs; set it to true", param="top_logprobs")
        if self.modalities is not None and self.modalities != ["text"]:
            raise bad_request(
                'this model writes text; modalities can only be ["text"]', param="modalities"
            )


router = APIRouter()

_EVENTS = event_form()


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, `n` times, in one piece or as a stream of chunks."""
    body.check()
    form = _EVENTS if body.stream else None
    answer = partial(_answer, usual=request.app.state.settings)
    return await respond(request, body.model, body, prepare_request, answer, form)


@router.post("/v1/chat/completions/input_tokens")
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def count_input_tokens(request: Request, body: ChatRequest) -> dict[str, Any]:
    """Count the tokens of a conversation's prompt. Nothing is generated."""
    body.check()
    return input_tokens(await on_model(request, body.model, body, prepare_request))


def prepare_request(model: Model, body: ChatRequest, *, bound: bool = True) -> PreparedChat:
    """The conversation. Without `bound` no schema binds its answer, as for its prompt alone."""
    messages, begun = [message.for_template() for message in body.messages], ""
    if body.continue_final_message is not False and body.begins_answer:
        messages, begun = split_begun(messages)
    tools = [tool.function.tool for tool in body.tools or ()]
    budgets = body.reasoning_budget_tokens, body.thinking_budget_tokens, body.reasoning_budget
    return prepare_chat(
        model,
        messages,
        tools=tool_use(tools, *body.choice, parallel=body.parallel_tool_calls),
        schema=body.schema_of_answer if bound else None,
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs,
        reasoning_budget=next((n for n in budgets if n is not None), None),
        reasoning_budget_message=body.reasoning_budget_message,
        begun=begun,
        begin_answer=body.begins_answer,
    )


def _answer(
    loaded: LoadedModel, body: ChatRequest, chat: PreparedChat, usual: ServerSettings
) -> ChoicesAnswer:
    n_logprobs = body.n_alternatives
    options = chat.options(body, max_tokens=body.limit, logprobs=n_logprobs)
    options["prompt_progress"] = bool(body.return_progress)
    if body.prompt_logprobs is not None:
        options["prompt_logprobs"] = body.prompt_logprobs
    if body.bindings and {"lark", "json_schema"} & options.keys():
        raise bad_request(
            "structured_outputs and tool_choice both bind the answer; give one of them",
            param="structured_outputs",
        )
    tasks = tasks_for(chat.prompt, options | body.bindings, body.n or 1)
    choices = [
        _ChatChoice(
            index,
            ChatAnswer(
                loaded.model,
                chat,
                logprobs=n_logprobs is not None,
                raw_thoughts=(body.reasoning_format or usual.reasoning_format) == "none",
            ),
            DraftDetail() if body.draft_detail else None,
        )
        for index in range(len(tasks))
    ]
    told: dict[str, Any] = {"warning": chat.warning} if chat.warning else {}
    if usual.verbose if body.verbose is None else body.verbose:
        told["__verbose"] = {"prompt": chat.text}
    return ChoicesAnswer(
        loaded,
        body,
        tasks,
        choices,
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        id_prefix="chatcmpl",
        told=told,
    )


class DraftDetail:
    """Reads the model's chunks, and tells for each piece of shown text whether it was an accepted
    draft: our addition to the chunks of a stream."""

    def __init__(self) -> None:
        self._origins = Origins()
        self._rounds: list[int] = []
        self._copied: list[int] = []
        self._open: list[bool] = []  # accepted drafts of a round whose last token is still to come
        self._begun = False
        self._drafting: str | None = None
        self._warning: str | None = None

    def push(self, chunk: Chunk) -> None:
        """Take in the model's addition."""
        self._origins.add(chunk.pieces)
        for drafted, copied in zip(chunk.from_draft, chunk.from_copy, strict=True):
            self._count(drafted, copied)
        self._drafting = chunk.drafting
        if chunk.result is not None:
            self._warning = chunk.result.stats.warning

    def take(self, shown: str) -> dict[str, Any]:
        """The detail for `shown`, the next text of the message.

        `pieces` join to `shown`. Those that no drafter proposed, as the text had them already, have
        `from_copy`. `rounds` has the number of tokens emitted by each verify pass since the last
        call: accepted drafts and one of the target's own; `copied` the number of copies among these
        drafts. `drafting` is the controller's decision at the moment, and why; None for a fixed
        width.
        """
        detail = {
            "pieces": _pieces(shown, self._origins.of(shown)),
            "rounds": self._rounds,
            "copied": self._copied,
            "drafting": self._drafting,
        }
        self._rounds, self._copied = [], []
        return detail if self._warning is None else {**detail, "warning": self._warning}

    def _count(self, from_draft: bool, from_copy: bool) -> None:
        if from_draft:
            self._open.append(from_copy)
            return
        if self._begun:  # the first token comes from the prompt, and belongs to no round
            self._rounds.append(len(self._open) + 1)
            self._copied.append(sum(self._open))
        self._begun, self._open = True, []


def _pieces(text: str, origins: Sequence[Origin]) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    for (drafted, copied), run in groupby(
        zip(text, origins, strict=True), key=lambda pair: pair[1]
    ):
        pieces.append({"text": "".join(char for char, _ in run), "from_draft": drafted})
        if copied:
            pieces[-1]["from_copy"] = True
    return pieces


class _ChatChoice:
    """One of the answers. `drafts`: the detail on drafted text in each chunk of a stream."""

    def __init__(self, index: int, answer: ChatAnswer, drafts: DraftDetail | None) -> None:
        self._index = index
        self._answer = answer
        self._drafts = drafts
        self._begun = False

    @property
    def n_reasoning_tokens(self) -> int:
        return self._answer.n_reasoning_tokens

    def whole(self) -> dict[str, Any]:
        return {
            "index": self._index,
            "message": self._message(),
            "logprobs": self._answer.logprobs.all(),
            "finish_reason": self._answer.finish_reason,
        }

    def pieces(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """A role, deltas, and at the end a reason to finish."""
        if self._drafts is not None:
            self._drafts.push(chunk)
        deltas = [_delta(event) for event in self._answer.take(chunk)]
        if (deltas or chunk.result) and not self._begun:
            self._begun = True
            yield self._piece({"role": "assistant", "content": "", "refusal": None}, None)
        for delta in deltas:
            yield self._piece(delta, self._answer.logprobs.take()) | self._detail(delta)
        if chunk.result is not None:
            reason = self._answer.finish_reason
            yield self._piece({}, self._answer.logprobs.take(), reason) | self._detail({})

    def _piece(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs}
        return {"choices": [{**choice, "finish_reason": finish_reason}]}

    def _detail(self, delta: dict[str, Any]) -> dict[str, Any]:
        """The detail of drafts for a chunk with `delta`, as a field of it."""
        if self._drafts is None:
            return {}
        shown = delta.get("content") or delta.get("reasoning_content") or ""
        return {"draft_detail": self._drafts.take(shown)}

    def _message(self) -> dict[str, Any]:
        answer = self._answer
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or (None if answer.calls else ""),
            "refusal": None,
        }
        if answer.thoughts:
            message["reasoning_content"] = "".join(answer.thoughts)
        if answer.calls:
            message["tool_calls"] = answer.calls
        return message


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index):
            return {"tool_calls": [{"index": index, **call_of(event)}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
