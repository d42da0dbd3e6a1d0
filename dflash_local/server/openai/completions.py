"""`/v1/completions`: https://platform.openai.com/docs/api-reference/completions."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag

from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import respond
from dflash_local.server.answering.generation import tasks_for
from dflash_local.server.answering.infill_prompt import infill_tokens, plain_tokens
from dflash_local.server.answering.sampling_fields import sampling_options
from dflash_local.server.answering.token_logprobs import (
    LogprobStream,
    completion_logprobs,
    with_prompt,
)
from dflash_local.server.http.errors import bad_request
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.openai.choices import ChoicesAnswer, ChoicesRequest

MAX_ANSWERS = 32
"""To one request; each needs a slot."""


def _kind(value: Any) -> str:
    if not isinstance(value, list):
        return "text"
    return "ids" if value and isinstance(value[0], int) else "several"


PromptField = Annotated[
    Annotated[bounds.Text, Tag("text")]
    | Annotated[bounds.TokenIds, Tag("ids")]
    | Annotated[
        bounds.ListOf[bounds.TextOr[bounds.TokenIds]],
        Field(min_length=1, max_length=bounds.MAX_CHOICES),
        Tag("several"),
    ],
    Discriminator(_kind),
]
"""A text, token ids, or several of either."""


class CompletionsRequest(ChoicesRequest):
    """Prompts to go on from. `suffix` comes after the answer: models that were taught to fill a gap
    write the text between. A server of one model takes any model name."""

    USUAL_LIMIT: ClassVar[int | None] = 16  # OpenAI's, for this route only

    prompt: PromptField
    suffix: bounds.Text | None = None
    echo: bounds.Flag | None = None
    best_of: bounds.Choices | None = None
    logprobs: bounds.Logprobs | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if isinstance(given, str):
            return [given]
        ids = [piece for piece in given if isinstance(piece, int)]
        return [ids] if ids else [piece for piece in given if not isinstance(piece, int)]

    @property
    def n_alternatives(self) -> int | None:
        """The number to report with each token; None for no log-probabilities."""
        return self.n_probs or None if self.logprobs is None else self.logprobs

    def check(self) -> None:
        super().check()
        n = self.n or 1
        if len(self.prompts) * n > MAX_ANSWERS:
            raise bad_request(
                f"{len(self.prompts)} prompts with n {n} ask for {len(self.prompts) * n} answers; "
                f"one request can have at most {MAX_ANSWERS}",
                param="n",
            )
        if self.best_of is not None and self.best_of != n:
            raise bad_request(
                f"best_of is {self.best_of} with n {n}; answers are not ranked here, leave it out",
                param="best_of",
            )
        if self.echo and self.n_alternatives is not None and self.stream:
            raise bad_request(
                "echo with logprobs is for answers in one piece; leave stream out", param="logprobs"
            )
        if self.echo and self.suffix:
            raise bad_request(
                "echo with suffix is not supported; leave out one of the two", param="echo"
            )


router = APIRouter()

_EVENTS = event_form()


@router.post("/v1/completions")
async def create_completion(request: Request, body: CompletionsRequest) -> Response:
    """Go on from each prompt, `n` times; the answers to one prompt are neighbours."""
    body.check()
    answer = partial(_answer, options=_options(body))
    form = _EVENTS if body.stream else None
    return await respond(request, body.model, body, _prompts, answer, form)


def _options(body: CompletionsRequest) -> dict[str, Any]:
    options = {
        **sampling_options(body),
        "max_tokens": body.limit,
        "prompt_progress": bool(body.return_progress),
    }
    if body.schema_of_answer is not None:
        options["json_schema"] = body.schema_of_answer
    if body.n_alternatives is not None:
        options["logprobs"] = body.n_alternatives
        if body.echo:
            options["prompt_logprobs"] = body.n_alternatives
    if body.prompt_logprobs is not None:
        options["prompt_logprobs"] = max(body.prompt_logprobs, options.get("prompt_logprobs", 0))
    return options | body.bindings


def _prompts(model: Model, body: CompletionsRequest) -> list[list[int]]:
    vocabulary, n_ctx, suffix = model.target.vocabulary, model.n_ctx, body.suffix

    def tokens(prompt: str | list[int]) -> list[int]:
        if not suffix:
            return vocabulary.tokenize(prompt, n_ctx=n_ctx) if isinstance(prompt, str) else prompt
        marks = infill_tokens(vocabulary)
        before = plain_tokens(vocabulary, prompt, n_ctx) if isinstance(prompt, str) else prompt
        return [*vocabulary.start(), *marks.around(before, plain_tokens(vocabulary, suffix, n_ctx))]

    return list(map(tokens, body.prompts))


def _answer(
    loaded: LoadedModel,
    body: CompletionsRequest,
    prompts: list[list[int]],
    *,
    options: dict[str, Any],
) -> ChoicesAnswer:
    n = body.n or 1
    tasks = [task for prompt in prompts for task in tasks_for(prompt, options, n)]
    vocabulary = loaded.model.target.vocabulary
    begun = [
        prompt if isinstance(prompt, str) else vocabulary.detokenize(prompt, special=True)
        for prompt in body.prompts
        if body.echo
    ] or [""] * len(prompts)
    write = None if body.n_alternatives is None else completion_logprobs
    choices = [
        _TextChoice(index, begun[index // n], LogprobStream(vocabulary, write), task.prompt)
        for index, task in enumerate(tasks)
    ]
    kind = "text_completion"
    return ChoicesAnswer(loaded, body, tasks, choices, kind=kind, chunk_kind=kind, id_prefix="cmpl")


class _TextChoice:
    """One of the answers. `text` is the part of its prompt that it begins with."""

    n_reasoning_tokens = None

    def __init__(
        self, index: int, text: str, logprobs: LogprobStream, prompt: Sequence[int]
    ) -> None:
        self._index = index
        self._text = text
        self._n_echoed = len(text)
        self._prompt = prompt
        self._logprobs = logprobs
        self._result: Result | None = None
        self._n_shown = 0
        self._finish_reason: str | None = None

    def whole(self) -> dict[str, Any]:
        told = self._logprobs.all()
        if told is not None and self._n_echoed and self._result is not None:
            known, n = self._result.prompt_logprobs, self._n_echoed
            told = with_prompt(self._logprobs.vocabulary, self._prompt, known, told, n)
        return self._choice(self._text, told)

    def pieces(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """A piece of text; with the last one a reason to finish."""
        self._logprobs.push(chunk)
        self._text += chunk.text
        self._finish_reason = chunk.finish_reason
        self._result = chunk.result
        new, self._n_shown = self._text[self._n_shown :], len(self._text)
        if new or chunk.result is not None:
            yield {"choices": [self._choice(new, self._logprobs.take())]}

    def _choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
        }
