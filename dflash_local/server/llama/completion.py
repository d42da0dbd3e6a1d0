"""`/completion` and `/infill`: llama-server's own completions, and the requests of editors at every
key press. Fields that only tell llama-server how to work are ignored: batches, the order of
samplers."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import AliasChoices, BaseModel, Field, ValidationInfo, field_validator

from dflash_local.chat.pictures import MOST_IMAGES, Pictures
from dflash_local.model import Model
from dflash_local.options import sampling_of
from dflash_local.pairs.defaults import CHAT_SAMPLING
from dflash_local.result import Chunk, Result
from dflash_local.sampling.chances import chances_of
from dflash_local.sampling.params import SamplingParams, TokenLogprob
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import RequestCheck, respond
from dflash_local.server.answering.generation import (
    GenerationTask,
    RunningTimings,
    prompt_progress,
    stream_all,
    tasks_for,
    timings,
)
from dflash_local.server.answering.infill_prompt import Gap, OtherText, infill_prompt, infill_room
from dflash_local.server.answering.sampling_fields import (
    SamplingFields,
    sampling_options,
    usual_sampling,
)
from dflash_local.server.http.errors import bad_request
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.llama.tokenize import Piece, Pieces, mixed_text, mixed_tokens
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.target_model.images import n_cells, without_images

EVENTS = event_form(done=None)
_UNTOLD = ("cancel", "logprobs", "prompt_progress")
_MOST_CANDIDATES = 100
"""Of a draw whose chances are reported: as many as `n_probs` may ask for."""
_MixedText = bounds.TextOr[Pieces]
_ResponseField = Annotated[str, Field(strict=True, max_length=256)]


class LlamaRequest(SamplingFields):
    """Fields of both `/completion` and `/infill`, under llama-server's names and defaults."""

    model: bounds.Label | None = None
    stream: bounds.Flag = False
    n_predict: bounds.Predict = Field(
        default=-1,
        validation_alias=AliasChoices("n_predict", "max_completion_tokens", "max_tokens"),
        description="The most tokens of the answer; -1 is as many as the context holds, and 0 "
        "none: the prompt is read into the cache.",
    )
    n_cmpl: bounds.Choices = Field(
        default=1,
        validation_alias=AliasChoices("n_cmpl", "n"),
        description="Answers to each prompt; more than one are returned as a list.",
    )
    n_probs: bounds.Alternatives = Field(
        default=0,
        validation_alias=AliasChoices("n_probs", "logprobs"),
        description="How many alternatives to report with each token.",
    )
    post_sampling_probs: bounds.Flag = Field(
        default=False,
        description="Report with `n_probs` the chances from which each token was drawn, after "
        "top_k, top_p, min_p and temperature, and not the model's own.",
    )
    n_indent: bounds.Count = Field(
        default=0, description="The answer ends before a line that is indented by fewer characters."
    )
    json_schema: bounds.JsonObject | bounds.Flag | None = None
    return_tokens: bounds.Flag = False
    timings_per_token: bounds.Flag = False
    return_progress: bounds.Flag = Field(
        default=False,
        description="A stream begins with how much of the prompt is read, again and again.",
    )
    response_fields: Annotated[bounds.ListOf[_ResponseField], Field(max_length=256)] | None = Field(
        default=None,
        description="Return these fields only; `timings/prompt_n` is one of an inner object.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _null(cls, value: Any, info: ValidationInfo) -> Any:
        """llama-server reads null as a missing field."""
        if value is not None or info.field_name is None:
            return value
        field = cls.model_fields[info.field_name]
        return value if field.is_required() else field.get_default(call_default_factory=True)

    @field_validator("t_max_predict_ms", mode="before")
    @classmethod
    def _no_limit(cls, value: Any) -> Any:
        return 0 if value == -1 else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """Besides OpenAI's form `[[id, bias], ...]`, and `false` for a token that is forbidden."""
        value = bounds.few(value)
        if isinstance(value, list) and all(isinstance(x, list) and len(x) == 2 for x in value):
            value = {str(token): bias for token, bias in value}
        if isinstance(value, dict):
            value = {token: -100 if bias is False else bias for token, bias in value.items()}
        return value


class MediaPrompt(BaseModel):
    """A text with a marker in place of each picture, `<__media__>`, and their files in base64."""

    prompt_string: bounds.Text
    multimodal_data: Annotated[bounds.ListOf[bounds.Picture], Field(max_length=MOST_IMAGES)]


def _text_in(prompt: Any) -> Any:
    """The text of a prompt that is sent as an object, but without pictures."""
    if not isinstance(prompt, dict) or "prompt_string" not in prompt:
        return prompt
    return prompt if prompt.get("multimodal_data") else prompt["prompt_string"]


class CompletionRequest(LlamaRequest):
    """A prompt is a text, token ids, or both mixed in a list, or an object with a text as
    `prompt_string`. A list of texts only, or one that holds lists, is several prompts."""

    prompt: (
        bounds.Text
        | MediaPrompt
        | Annotated[bounds.ListOf[Piece | Pieces | MediaPrompt], Field(max_length=4 << 20)]
    )

    @property
    def prompts(self) -> list[list[str | int] | MediaPrompt]:
        given = self.prompt
        if isinstance(given, str):
            return [[given]]
        if isinstance(given, MediaPrompt):
            return [given]
        if any(isinstance(piece, int) for piece in given):
            return [[piece for piece in given if isinstance(piece, str | int)]]
        return [[piece] if isinstance(piece, str | int) else piece for piece in given]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        value = [_text_in(piece) for piece in value] if isinstance(value, list) else _text_in(value)
        # Before each of them is read, which takes a while for thousands.
        if isinstance(value, list):
            kinds = {type(piece) for piece in value}
            if int in kinds and not kinds.isdisjoint((list, dict)):
                raise ValueError("ids next to lists; give one prompt, or several each in a list")
            if int not in kinds and len(value) > bounds.MAX_CHOICES:
                raise ValueError(f"{len(value)} prompts; give at most {bounds.MAX_CHOICES}")
            if not value:
                raise ValueError("the prompt is empty; give a text, or token ids in a list")
        return value


class InfillRequest(LlamaRequest):
    """`prompt` stands in the gap already. It, the prefix and the suffix are texts, or lists of
    token ids and texts, which are read as the text that they make. `input_extra` is read before the
    gap; where the context cannot hold all of it, the first texts are left out.

    Without a temperature the answer is the likeliest one, and further ones are drawn at 0.8.
    """

    input_prefix: _MixedText
    input_suffix: _MixedText
    input_extra: Annotated[bounds.ListOf[OtherText], Field(max_length=1024)] = Field(
        default_factory=list
    )
    prompt: _MixedText = ""


def llama_options(body: LlamaRequest) -> dict[str, Any]:
    """Keyword arguments of `Model.astream`, without the time limit, which `LineLimits` applies."""
    options = {**sampling_options(body), "prompt_progress": body.stream and body.return_progress}
    options.pop("deadline_s", None)
    # Where the prompt is only read into the cache, one token is generated and not shown.
    options["max_tokens"] = None if body.n_predict < 0 else max(body.n_predict, 1)
    if body.json_schema is not None:
        options["json_schema"] = body.json_schema
    if body.n_probs:
        options["logprobs"] = body.n_probs
    return options


def drawn_by(options: Mapping[str, Any]) -> SamplingParams:
    """The sampling by these options of `Model.astream`, for `post_sampling_probs`. Raises ApiError
    if that takes more than the likeliest tokens of a row."""
    known = sampling_of(options)
    others = {
        "penalties": known.penalises,
        "dry_multiplier": known.is_dry,
        "top_n_sigma": known.top_n_sigma > 0,
        "typical_p": known.typical_p < 1,
        "xtc_probability": known.xtc_probability > 0,
        "dynatemp_range": known.dynatemp_range > 0,
        "logit_bias": bool(known.logit_bias),
        "ignore_eos": bool(options.get("ignore_eos")),
        "min_tokens": known.min_tokens > 0,
        "a grammar": known.bound,
    }
    given = [name for name, on in others.items() if on]
    if given:
        raise bad_request(
            f"post_sampling_probs is given with {', '.join(given)}, but goes with temperature, "
            "top_k, top_p and min_p only; leave the one or the other out",
            param="post_sampling_probs",
        )
    if known.greedy:
        return replace(known, top_k=1)
    if not 0 < known.top_k <= _MOST_CANDIDATES:
        raise bad_request(
            f"post_sampling_probs is given with top_k {known.top_k}; give 1 to {_MOST_CANDIDATES}",
            param="post_sampling_probs",
        )
    return known


class LlamaAnswers:
    """The answers to all tasks of a request: one as an object, several as a list."""

    def __init__(
        self, loaded: LoadedModel, body: LlamaRequest, tasks: Sequence[GenerationTask]
    ) -> None:
        self._loaded = loaded
        self._answers = [_LlamaAnswer(loaded, body, task, i) for i, task in enumerate(tasks)]

    async def events(self) -> AsyncIterator[Mapping[str, Any]]:
        tasks = [answer.task for answer in self._answers]
        async for index, chunk in stream_all(self._loaded, tasks):
            for event in self._answers[index].take(chunk):
                yield event

    def whole(self) -> Any:
        bodies = [answer.whole() for answer in self._answers]
        return bodies[0] if len(bodies) == 1 else bodies


class LineLimits:
    """Ends an answer in an editor between two lines, as llama-server does: before a line that is
    indented too little, and after the line during which its time is over.

    `n_indent`: the least blanks and tabs at the beginning of every line but the first, also of an
    empty one; 0 for any. `limit_s`: seconds since the first text after which the next line break
    ends the answer; 0 for no limit. Text that is shown is never taken back.
    """

    def __init__(
        self, n_indent: int, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._n_indent = n_indent
        self._limit_s = limit_s
        self._clock = clock
        self._began: float | None = None
        self._held = ""
        self._indenting = False
        self.ended = False

    def take(self, text: str) -> str:
        """The part of the answer to show now; indentation is held back until its line goes on."""
        if self._began is None:
            self._began = self._clock()
        late = self._limit_s > 0 and self._clock() - self._began > self._limit_s
        left, shown = self._held + text, ""
        while left and not self.ended:
            line, newline, rest = left.partition("\n")
            if self._indenting:
                body = line.lstrip(" \t")
                if not body and not newline:
                    break
                self.ended = len(line) - len(body) < self._n_indent
                if self.ended:
                    break
            shown += line + newline
            left = rest
            self._indenting = bool(newline) and self._n_indent > 0
            self.ended = bool(newline) and late
        self._held = "" if self.ended else left
        return shown

    def rest(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held


class _LlamaAnswer:
    """One answer while it arrives: the engine's chunks in, events out, at the end the whole."""

    def __init__(
        self, loaded: LoadedModel, body: LlamaRequest, task: GenerationTask, index: int
    ) -> None:
        self._cancel = threading.Event()
        self._body = body
        self._index = index
        self._model = loaded.model
        options = {**task.options, "cancel": self._cancel}
        self._drawn_by: SamplingParams | None = None
        if body.post_sampling_probs and body.n_probs:
            self._drawn_by = drawn_by({**usual_sampling(self._model), **task.options})
            options["logprobs"] = max(body.n_probs, self._drawn_by.top_k)
        self.task = GenerationTask(task.prompt, options)
        self._name = loaded.name
        asked = body.n_predict
        self._n_predict = (loaded.limited(max(asked, 0)) or -1) if asked else 0
        self._limits = LineLimits(body.n_indent, (body.t_max_predict_ms or 0) / 1000)
        self._text: list[str] = []
        self._n_tokens = 0
        self._unsent: list[int] = []
        self._unsent_logprobs: list[TokenLogprob] = []
        self._result: Result
        self._timings = RunningTimings() if body.timings_per_token else None

    def take(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """The events of a chunk: one if there is text to show, and the last one at the end."""
        if chunk.prompt is not None:
            told = prompt_progress(chunk.prompt, timed=self._timings is not None)
            yield {**self._partial(""), **told}
            return
        self._n_tokens += len(chunk.tokens)
        timed = {"timings": self._timings.take(chunk)} if self._timings else {}
        self._unsent += chunk.tokens
        self._unsent_logprobs += chunk.logprobs
        text = self._limits.take(chunk.text)
        if chunk.result is not None:
            text += self._limits.rest()
        elif self._limits.ended:
            self._cancel.set()
        if self._body.n_predict == 0:
            text = ""
        if text:
            self._text.append(text)
            yield {**self._partial(text), **timed}
        if chunk.result is not None:
            self._result = chunk.result
            if not self._body.n_predict:
                nothing: dict[str, Any] = {"text": "", "tokens": [], "logprobs": []}
                self._result = replace(chunk.result, **nothing, finish_reason="length")
            yield self._chosen({**self._last(), "content": "", "tokens": []})

    def whole(self) -> dict[str, Any]:
        last = self._last()
        if self._body.n_probs:
            last["completion_probabilities"] = self._probabilities(self._result.logprobs)
        return self._chosen(last)

    def _partial(self, text: str) -> dict[str, Any]:
        event: dict[str, Any] = {
            "index": self._index,
            "content": text,
            "tokens": self._unsent,
            "stop": False,
            "tokens_predicted": self._n_tokens,
            "tokens_evaluated": n_cells(self.task.prompt),
        }
        if self._body.n_probs:
            event["completion_probabilities"] = self._probabilities(self._unsent_logprobs)
        self._unsent, self._unsent_logprobs = [], []
        return event

    def _last(self) -> dict[str, Any]:
        result = self._result
        text = "".join(self._text)
        stop_type, stopping_word = self._stop(result)
        n = len(result.tokens)
        return {
            "index": self._index,
            "content": text,
            "tokens": result.tokens if self._body.return_tokens else [],
            "stop": True,
            "model": self._name,
            "tokens_predicted": n,
            "tokens_evaluated": result.stats.prompt_tokens,
            "tokens_cached": result.stats.cached_tokens,
            "generation_settings": self._settings(result),
            "prompt": self._model.target.vocabulary.detokenize(
                without_images(self.task.prompt), special=True
            ),
            "has_new_line": "\n" in text,
            "truncated": result.stats.shifts > 0
            or (result.finish_reason == "length" and n != max(self._n_predict, 0)),
            "stop_type": stop_type,
            "stopping_word": stopping_word,
            "timings": timings([result]),
        }

    def _stop(self, result: Result) -> tuple[str, str]:
        """The reason for the answer's end, and the stop text if that did it."""
        if self._limits.ended or result.finish_reason != "stop":
            return "limit", ""
        text = result.stopped_by
        return ("eos", "") if text is None else ("word", text)

    def _settings(self, result: Result) -> dict[str, Any]:
        options = {k: v for k, v in self.task.options.items() if k not in _UNTOLD}
        biases = options.pop("logit_bias", {})
        ends = self._model.target.vocabulary.ends if self._body.ignore_eos else ()
        never: list[dict[str, Any]] = [{"token": token, "bias": None} for token in ends]
        options["max_tokens"] = self._n_predict
        return {
            **options,
            "seed": result.seed,
            "stop": list(self._body.stop_texts),
            "n_predict": self._n_predict,
            "n_probs": self._body.n_probs,
            "n_ctx": self._model.n_ctx,
            # llama-server's power law, which is not had here: it is off.
            "adaptive_target": -1.0,
            "adaptive_decay": 0.9,
            "logit_bias": [{"token": t, "bias": max(b, -1e30)} for t, b in biases.items()] + never,
            "stream": self._body.stream,
        }

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields that were asked for; a field of an inner object has its path as its name."""
        paths = self._body.response_fields
        if not paths:
            return answer
        chosen = {}
        for path in paths:
            found: Any = answer
            for key in path.split("/"):
                found = found.get(key) if isinstance(found, dict) else None
            if found is not None:
                chosen[path] = found
        return chosen

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        if self._drawn_by is not None:
            return [self._drawn_from(entry, self._drawn_by) for entry in logprobs]
        return [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for entry in logprobs
        ]

    def _drawn_from(self, entry: TokenLogprob, sampling: SamplingParams) -> dict[str, Any]:
        """A token with its chance, and those of the likeliest that could have been drawn."""
        logprobs = np.array([[logprob for _, logprob in entry.top]])
        chances = chances_of(logprobs, sampling, self._model.target.n_vocab)[0].tolist()
        known = {token: chance for (token, _), chance in zip(entry.top, chances, strict=True)}
        top = [(token, chance) for token, chance in known.items() if chance > 0]
        return {
            **self._piece(entry.token),
            "prob": known.get(entry.token, 0.0),
            "top_probs": [
                {**self._piece(token), "prob": chance}
                for token, chance in top[: self._body.n_probs]
            ],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {**self._piece(token), "logprob": max(logprob, -1e30)}  # JSON has no infinity

    def _piece(self, token: int) -> dict[str, Any]:
        piece = self._model.target.vocabulary.piece(token, special=True)
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece)}


router = APIRouter()


@router.post("/completion")
@router.post("/completions", include_in_schema=False)
async def completion(request: Request, body: CompletionRequest) -> Response:
    """Go on from each prompt. `tokens_cached` of its tokens needed no computing."""
    form = EVENTS if body.stream else None
    return await respond(request, body.model, body, _token_ids, _answers, form)


@router.post("/infill")
async def infill(request: Request, body: InfillRequest) -> Response:
    """Fill a gap. A model that has no tokens for it goes on from the text before the gap."""
    check: RequestCheck = request.app.state.request_check

    def answers(loaded: LoadedModel, body: InfillRequest, prompt: list[int]) -> LlamaAnswers:
        if loaded.model.target.vocabulary.infill is None:
            line = "has no tokens to fill a gap with; /infill goes on from the text before it"
            check.tell_once(f"{loaded.name} {line}")
        return LlamaAnswers(loaded, body, _infill_tasks(body, prompt))

    form = EVENTS if body.stream else None
    return await respond(request, body.model, body, _infill_prompt, answers, form)


def _token_ids(model: Model, body: CompletionRequest) -> list[list[int]]:
    vocabulary = model.target.vocabulary

    def tokens_of(prompt: list[str | int] | MediaPrompt) -> list[int]:
        if not isinstance(prompt, MediaPrompt):
            return mixed_tokens(vocabulary, prompt, n_ctx=model.n_ctx)
        pictures = Pictures(model.projector)
        text = pictures.marked(prompt.prompt_string, prompt.multimodal_data)
        starts = iter((True,))  # the first part begins as the model wants it
        return pictures.put_into(
            text,
            lambda part: vocabulary.tokenize(
                part, add_special=next(starts, False), n_ctx=model.n_ctx
            ),
        )

    return [tokens_of(prompt) for prompt in body.prompts]


def _answers(
    loaded: LoadedModel, body: CompletionRequest, prompts: list[list[int]]
) -> LlamaAnswers:
    options = llama_options(body)
    tasks = [task for prompt in prompts for task in tasks_for(prompt, options, body.n_cmpl)]
    return LlamaAnswers(loaded, body, tasks)


def _infill_prompt(model: Model, body: InfillRequest) -> list[int]:
    vocabulary = model.target.vocabulary
    texts = (body.input_prefix, body.input_suffix, body.prompt)
    prefix, suffix, begun = (mixed_text(vocabulary, text) for text in texts)
    gap = Gap(prefix, suffix, begun, body.input_extra)
    return infill_prompt(vocabulary, gap, room=infill_room(model.n_ctx, body.n_predict))


def _infill_tasks(body: InfillRequest, prompt: list[int]) -> list[GenerationTask]:
    """The first of several answers is the likeliest, unless the request has a temperature."""
    tasks = tasks_for(prompt, llama_options(body), body.n_cmpl)
    if body.temperature is None:
        drawn = CHAT_SAMPLING["temperature"]
        for i, task in enumerate(tasks):
            options = {**task.options, "temperature": drawn if i else 0.0}
            tasks[i] = GenerationTask(prompt, options)
    return tasks
