"""`/v1/completions`: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.api_answer import respond
from dflash_local.server.answering.generation import GenerationTask, tasks_for
from dflash_local.server.answering.infill_prompt import infill_tokens, plain_tokens, start_tokens
from dflash_local.server.answering.sampling_fields import sampling_options
from dflash_local.server.answering.token_logprobs import LogprobStream, completion_logprobs
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.openai.choices import ChoicesAnswer
from dflash_local.server.openai.completions_schema import CompletionsRequest
from dflash_local.target.vocabulary import Vocabulary

router = APIRouter()

_EVENTS = event_form()


@router.post("/v1/completions")
async def create_completion(request: Request, body: CompletionsRequest) -> Response:
    """Go on from each prompt, `n` times; the answers to one prompt are neighbours."""
    body.check()
    options = _options(body)

    async def begin(loaded: LoadedModel) -> _TextCompletion:
        prompts = await loaded.threads.run(_prompts, loaded.model, body)
        tasks = [task for prompt in prompts for task in tasks_for(prompt, options, body.n or 1)]
        return _TextCompletion(loaded, body, tasks)

    return await respond(request, body.model, begin, _EVENTS if body.stream else None)


def _options(body: CompletionsRequest) -> dict[str, Any]:
    options = {**sampling_options(body), "max_tokens": body.limit}
    if body.schema_of_answer is not None:
        options["json_schema"] = body.schema_of_answer
    if body.n_alternatives is not None:
        options["logprobs"] = body.n_alternatives
    return options | body.bindings


def _prompts(model: Model, body: CompletionsRequest) -> list[list[int]]:
    return [_token_ids(model, prompt, body.suffix) for prompt in body.prompts]


def _token_ids(model: Model, prompt: str | list[int], suffix: str | None) -> list[int]:
    vocabulary, n_ctx = model.target.vocabulary, model.n_ctx
    if not suffix:
        return vocabulary.tokenize(prompt, n_ctx=n_ctx) if isinstance(prompt, str) else prompt
    marks = infill_tokens(vocabulary)
    before = plain_tokens(vocabulary, prompt, n_ctx) if isinstance(prompt, str) else prompt
    after = plain_tokens(vocabulary, suffix, n_ctx)
    start = start_tokens(vocabulary)
    return [*start, marks.prefix, *before, marks.suffix, *after, marks.middle]


class _TextAnswer:
    """One answer while it arrives. `begin` is the text that it begins with, before the model's."""

    def __init__(self, vocabulary: Vocabulary, begin: str, *, logprobs: bool) -> None:
        self.text = begin
        self.result: Result | None = None
        self._vocabulary = vocabulary
        self._logprobs = LogprobStream(vocabulary) if logprobs else None
        self._n_shown = 0

    @property
    def finish_reason(self) -> str | None:
        return self.result.finish_reason if self.result is not None else None

    def take(self, chunk: Chunk) -> None:
        if self._logprobs is not None:
            self._logprobs.push(chunk)
        self.result = chunk.result
        self.text += chunk.text

    def take_text(self) -> str:
        """What is new since the last call."""
        new, self._n_shown = self.text[self._n_shown :], len(self.text)
        return new

    def take_logprobs(self) -> dict[str, Any] | None:
        """Those of the tokens since the last call; None where there are none or nobody asked."""
        placed = self._logprobs.take() if self._logprobs is not None else []
        return completion_logprobs(self._vocabulary, placed) if placed else None

    def all_logprobs(self) -> dict[str, Any] | None:
        """Those of all tokens; None where nobody asked."""
        if self._logprobs is None:
            return None
        return completion_logprobs(self._vocabulary, self._logprobs.shown)


class _TextCompletion(ChoicesAnswer):
    """The answers to one request."""

    KIND = CHUNK_KIND = "text_completion"
    ID_PREFIX = "cmpl"

    def __init__(
        self, loaded: LoadedModel, body: CompletionsRequest, tasks: list[GenerationTask]
    ) -> None:
        super().__init__(loaded, tasks, per_prompt=body.n or 1, body=body)
        vocabulary = loaded.model.target.vocabulary
        logprobs = body.n_alternatives is not None
        self._answers = [
            _TextAnswer(vocabulary, _echo(vocabulary, body, i), logprobs=logprobs)
            for i in range(len(tasks))
        ]

    def _take(self, index: int, chunk: Chunk) -> None:
        self._answers[index].take(chunk)

    def _choice(self, index: int) -> dict[str, Any]:
        answer = self._answers[index]
        return {
            "index": index,
            "text": answer.text,
            "logprobs": answer.all_logprobs(),
            "finish_reason": answer.finish_reason,
        }

    def _pieces(self, index: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """A piece of text; with the last one a reason to finish."""
        answer = self._answers[index]
        answer.take(chunk)
        text = answer.take_text()
        if text or answer.result is not None:
            choice = {
                "index": index,
                "text": text,
                "logprobs": answer.take_logprobs(),
                "finish_reason": answer.finish_reason,
            }
            yield {"choices": [choice]}

    def _results(self) -> list[Result]:
        return [answer.result for answer in self._answers if answer.result is not None]


def _echo(vocabulary: Vocabulary, body: CompletionsRequest, index: int) -> str:
    if not body.echo:
        return ""
    prompt = body.prompts[index // (body.n or 1)]
    return prompt if isinstance(prompt, str) else vocabulary.detokenize(prompt, special=True)
