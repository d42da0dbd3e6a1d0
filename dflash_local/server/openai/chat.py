"""`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Request, Response

from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.chat.reader import call_of
from dflash_local.model import Model
from dflash_local.origins import Origin, Origins
from dflash_local.result import Chunk
from dflash_local.server.answering.api_answer import on_model, respond
from dflash_local.server.answering.chat import ChatAnswer, PreparedChat, input_tokens, prepare_chat
from dflash_local.server.answering.generation import tasks_for
from dflash_local.server.answering.tools import tool_use
from dflash_local.server.http.errors import bad_request
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.http.settings import ServerSettings
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
    messages, begun = body.conversation
    return prepare_chat(
        model,
        messages,
        tools=tool_use(body.functions, *body.choice, parallel=body.parallel_tool_calls),
        schema=body.schema_of_answer if bound else None,
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs,
        reasoning_budget=body.budget,
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
