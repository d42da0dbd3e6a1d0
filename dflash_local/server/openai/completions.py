"""`/v1/completions`: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from dflash_local.errors import ClosedError
from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.api_answer import answer
from dflash_local.server.answering.generation import Task, choices, off_loop, stream_all
from dflash_local.server.answering.sampling_fields import sampling_options
from dflash_local.server.answering.token_logprobs import Entry, LogprobStream, completion_logprobs
from dflash_local.server.answering.usage import timings, usage
from dflash_local.server.http.errors import ApiError
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.models.served import Served
from dflash_local.server.openai.completions_schema import CompletionsRequest
from dflash_local.server.openai.envelope import envelope
from dflash_local.server.openai.response_format import schema_of
from dflash_local.target.vocabulary import Vocabulary

router = APIRouter()

_EVENTS = event_form()


@router.post("/v1/completions")
async def create_completion(request: Request, body: CompletionsRequest) -> Response:
    """Go on with each prompt, `n` times over; the answers to one prompt are neighbours."""
    body.check()
    options = _options(body)

    async def begin(served: Served) -> _Completion:
        prompts = await off_loop(_prompts, served.model, body)
        tasks = [task for prompt in prompts for task in choices(prompt, options, body.n or 1)]
        return _Completion(served, body, tasks)

    return await answer(request, body.model, begin, _EVENTS if body.stream else None)


def _options(body: CompletionsRequest) -> dict[str, Any]:
    options = {**sampling_options(body), "max_tokens": body.limit}
    schema = schema_of(body.response_format)
    schema = body.json_schema if schema is None else schema
    if schema is not None:
        options["json_schema"] = schema
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
    return options


def _prompts(model: Model, body: CompletionsRequest) -> list[list[int]]:
    return [_token_ids(model, prompt, body.suffix) for prompt in body.prompts]


def _token_ids(model: Model, prompt: str | list[int], suffix: str | None) -> list[int]:
    vocabulary = model.target.vocabulary
    if not suffix:
        if isinstance(prompt, str):
            return vocabulary.tokenize(prompt, n_ctx=model.n_ctx)
        return prompt
    marks = vocabulary.infill
    if marks is None:
        raise ApiError(
            400,
            "this model has no tokens to fill a gap with; leave out suffix, or take a model that "
            "was taught to, as coders are",
            param="suffix",
        )
    # What the model wants at the start of any text, less what it wants at the end of one.
    start = [t for t in vocabulary.tokenize("")[:1] if not vocabulary.ends_text(t)]
    before, after = (_plain(model, part) for part in (prompt, suffix))
    return [*start, marks.prefix, *before, marks.suffix, *after, marks.middle]


def _plain(model: Model, part: str | list[int]) -> list[int]:
    """Names of special tokens in somebody's code are text like any other."""
    if isinstance(part, str):
        return model.target.vocabulary.tokenize(
            part, special=False, add_special=False, n_ctx=model.n_ctx
        )
    return part


class _Answer:
    """One answer on its way."""

    def __init__(self, vocabulary: Vocabulary, echoed: str, *, logprobs: bool) -> None:
        self.text = echoed
        self.result: Result | None = None
        self._vocabulary = vocabulary
        self._logprobs = LogprobStream(vocabulary) if logprobs else None
        self._entries: list[Entry] = []
        self._n_told = 0

    def take(self, chunk: Chunk) -> str:
        """The text that `chunk` adds."""
        if self._logprobs is not None:
            self._logprobs.push(chunk)
            self._entries += self._logprobs.take()
        if chunk.result is not None:
            if chunk.result.finish_reason == "cancelled":
                raise ClosedError("the model was closed in the middle of this answer")
            self.result = chunk.result
        self.text += chunk.text
        return chunk.text

    def take_logprobs(self) -> dict[str, Any] | None:
        """Those of the tokens since the last call; None where there are none, or nobody asked."""
        entries = self._entries[self._n_told :]
        self._n_told = len(self._entries)
        return completion_logprobs(self._vocabulary, entries) if entries else None

    def all_logprobs(self) -> dict[str, Any] | None:
        """Those of all tokens; None where nobody asked."""
        if self._logprobs is None:
            return None
        return completion_logprobs(self._vocabulary, self._entries)


class _Completion:
    """The answers to one request."""

    def __init__(self, served: Served, body: CompletionsRequest, tasks: list[Task]) -> None:
        self._served = served
        self._body = body
        self._tasks = tasks
        vocabulary = served.model.target.vocabulary
        self._answers = [
            _Answer(vocabulary, _echoed(vocabulary, body, i), logprobs=body.logprobs is not None)
            for i in range(len(tasks))
        ]

    async def whole(self) -> Response:
        head = envelope(self._served, "text_completion", prefix="cmpl")
        async for _ in self._pieces():
            pass
        return await off_loop(self._told, head)

    def _told(self, head: dict[str, Any]) -> Response:
        """The whole answer. With log-probabilities it is long, and takes its time to be written."""
        told = [
            _choice(index, answer.text, answer.all_logprobs(), _reason(answer))
            for index, answer in enumerate(self._answers)
        ]
        return JSONResponse({**head, "choices": told, **self._costs()})

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Pieces of text and a reason to finish for each answer; the costs in the last chunk."""
        head = envelope(self._served, "text_completion", prefix="cmpl")
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        no_usage = {"usage": None} if wants_usage else {}
        echoes = {i: answer.text for i, answer in enumerate(self._answers) if answer.text}
        left = len(self._tasks)
        async for index, text in self._pieces():
            answer = self._answers[index]
            text = echoes.pop(index, "") + text
            ended = answer.result is not None
            if not text and not ended:
                continue
            left -= ended
            costs = {"timings": self._timings()} if not (left or wants_usage) else {}
            chunk = _choice(index, text, answer.take_logprobs(), _reason(answer))
            yield {**head, "choices": [chunk], **no_usage, **costs}
        if wants_usage:
            yield {**head, "choices": [], **self._costs()}

    async def _pieces(self) -> AsyncIterator[tuple[int, str]]:
        async for index, chunk in stream_all(self._served, self._tasks):
            yield index, self._answers[index].take(chunk)

    def _costs(self) -> dict[str, Any]:
        told = usage(self._results(), per_prompt=self._body.n or 1)
        return {"usage": told, "timings": self._timings()}

    def _timings(self) -> dict[str, Any]:
        return timings(self._results())

    def _results(self) -> list[Result]:
        return [answer.result for answer in self._answers if answer.result is not None]


def _echoed(vocabulary: Vocabulary, body: CompletionsRequest, index: int) -> str:
    if not body.echo:
        return ""
    prompt = body.prompts[index // (body.n or 1)]
    return prompt if isinstance(prompt, str) else vocabulary.detokenize(prompt, special=True)


def _reason(answer: _Answer) -> str | None:
    return answer.result.finish_reason if answer.result is not None else None


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
