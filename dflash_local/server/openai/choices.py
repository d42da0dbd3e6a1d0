"""The common part of `/v1/chat/completions` and `/v1/completions`: fields of requests, and answers
with a choice for each text, and their costs."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, Field, model_validator
from pydantic_core import from_json

from dflash_local.chat.lark import literal
from dflash_local.llama import runtime
from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering import bounds
from dflash_local.server.answering.generation import (
    GenerationTask,
    RunningTimings,
    prompt_progress,
    stream_all,
    timings,
)
from dflash_local.server.answering.sampling_fields import SamplingFields, token_limit
from dflash_local.server.answering.token_logprobs import prompt_logprobs
from dflash_local.server.http.errors import bad_request
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.target_model.images import n_cells
from dflash_local.version import version


class TextFormat(BaseModel):
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object. Clients of llama-server give a schema here too."""

    type: Literal["json_object"]
    json_schema: bounds.JsonObject | None = Field(None, alias="schema")


class NamedSchema(BaseModel):
    name: bounds.Label | None = None
    description: bounds.Text | None = None
    json_schema: bounds.JsonObject = Field(default_factory=dict, alias="schema")
    strict: bounds.Flag | None = None


class JsonSchemaFormat(BaseModel):
    """JSON of a schema: always strictly, whatever `strict` says."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


_GUIDED = ("json", "choice", "regex", "grammar")

ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StreamOptions(BaseModel):
    """`continuous_usage_stats` is vLLM's: each chunk tells the usage so far."""

    include_usage: bounds.Flag | None = None
    continuous_usage_stats: bounds.Flag | None = None


class StructuredOutputs(BaseModel):
    """vLLM's ways to bind an answer, of which a request gives at most one: to a JSON schema, to one
    of several texts, to a regular expression, or to a grammar in Lark or GBNF."""

    json_schema: bounds.JsonObject | bounds.JsonText | None = Field(None, alias="json")
    json_object: bounds.Flag | None = None
    choice: (
        Annotated[bounds.ListOf[bounds.StopText], Field(min_length=1, max_length=1024)] | None
    ) = None
    regex: Annotated[str, Field(strict=True, min_length=1, max_length=1 << 16)] | None = None
    grammar: bounds.JsonText | None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name, value in self if value]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; give one of them")
        return self

    @property
    def schema_of_answer(self) -> Any:
        """As `ChoicesRequest.schema_of_answer`."""
        given = self.json_schema
        if isinstance(given, str):
            try:
                given = from_json(given)
            except ValueError as error:
                raise bad_request(
                    f"the JSON schema is not valid JSON: {error}", param="structured_outputs"
                ) from None
        return given or self.json_object or None

    @property
    def bindings(self) -> dict[str, str]:
        """The keyword arguments of `Model.astream` that bind the answer's text."""
        if self.choice:
            return {"lark": f"start: {' | '.join(map(literal, self.choice))}"}
        if self.regex:
            return {"lark": f"start: {_pattern(self.regex)}"}
        if self.grammar:
            return {"grammar" if "::=" in self.grammar else "lark": self.grammar}
        return {}


def _pattern(regex: str) -> str:
    """A regular expression of the whole answer, as Lark writes it."""
    whole = regex.removeprefix("^")
    if whole.endswith("$") and not whole.endswith("\\$"):
        whole = whole[:-1]
    slashed = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], whole)
    return "/" + slashed.replace("\n", "\\n") + "/"


class ChoicesRequest(SamplingFields):
    """`n` are the answers to each prompt. `json_schema`, `n_predict`, `n_probs`,
    `timings_per_token` and `return_progress` are llama-server's, `structured_outputs`,
    `guided_...` and `prompt_logprobs` vLLM's."""

    USUAL_LIMIT: ClassVar[int | None] = None

    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    stream_options: StreamOptions | None = None
    n: bounds.Choices | None = None
    max_tokens: bounds.Predict | None = None
    response_format: ResponseFormat | None = None
    json_schema: bounds.JsonObject | None = None
    n_predict: bounds.Predict | None = None
    n_probs: bounds.Alternatives | None = None
    timings_per_token: bounds.Flag | None = None
    return_progress: bounds.Flag | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: bounds.Alternatives | None = None

    @model_validator(mode="before")
    @classmethod
    def _guided(cls, given: Any) -> Any:
        """vLLM's older names."""
        if not isinstance(given, dict):
            return given
        guided = {name: given.get(f"guided_{name}") for name in _GUIDED}
        guided = {name: value for name, value in guided.items() if value is not None}
        if guided and not given.get("structured_outputs"):
            return {**given, "structured_outputs": guided}
        return given

    @property
    def limit(self) -> int | None:
        """Tokens of an answer; None: to the end of text or of the context."""
        if self.max_tokens is None and self.n_predict is not None:
            # With 0 llama.vim has a prompt read into the cache.
            return token_limit("n_predict", self.n_predict or 1)
        return token_limit(
            "max_tokens", self.USUAL_LIMIT if self.max_tokens is None else self.max_tokens
        )

    @property
    def bindings(self) -> dict[str, str]:
        """The keyword arguments of `Model.astream` that bind the answer's text."""
        return self.structured_outputs.bindings if self.structured_outputs else {}

    @property
    def schema_of_answer(self) -> Any:
        """The JSON schema that binds the answer; True for any JSON object, None for free text."""
        given = self.response_format
        if isinstance(given, JsonObjectFormat):
            return given.json_schema or True
        if isinstance(given, JsonSchemaFormat):
            return given.json_schema.json_schema or True
        if self.structured_outputs is not None and self.json_schema is None:
            return self.structured_outputs.schema_of_answer
        return self.json_schema

    def check(self) -> None:
        """Raises ApiError if fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options are for streams; set stream", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "prompt_logprobs are for answers in one piece; leave stream out",
                param="prompt_logprobs",
            )
        if self.structured_outputs is not None and (self.response_format or self.json_schema):
            raise bad_request(
                "structured_outputs and a response format both bind the answer; give one of them",
                param="structured_outputs",
            )


class ArrivingChoice(Protocol):
    """One answer while it arrives."""

    def whole(self) -> dict[str, Any]:
        """The choice of the complete answer."""
        ...

    def pieces(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """The model's additions, as fields of the chunks of a stream. The last chunk gives at least
        one piece."""
        ...

    @property
    def n_reasoning_tokens(self) -> int | None:
        """None if the API has no reasoning."""
        ...


class ChoicesAnswer:
    """The answers to all tasks of a request. Each `n` neighbours answer one prompt. `kind` and
    `chunk_kind` are the API's names of them, whole and as chunks.

    `body` says what a stream tells besides them: with `include_usage` its last chunk the usage,
    with `continuous_usage_stats` each chunk, with `timings_per_token` each chunk the time, and
    with `return_progress` the first ones how much of the prompt is read.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        body: ChoicesRequest,
        tasks: Sequence[GenerationTask],
        choices: Sequence[ArrivingChoice],
        *,
        kind: str,
        chunk_kind: str,
        id_prefix: str,
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._loaded = loaded
        self._tasks = tasks
        self._choices = choices
        self._kind = kind
        self._chunk_kind = chunk_kind
        self._beside = dict(told)
        self._per_prompt = body.n or 1
        self._reports_prompt = body.prompt_logprobs is not None
        self._told = body.stream_options or StreamOptions()
        self._id = f"{id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._results: dict[int, Result] = {}
        self._n_tokens = [0] * len(tasks)
        self._running = [RunningTimings() for _ in tasks] if body.timings_per_token else []

    def whole(self) -> dict[str, Any]:
        choices = [choice.whole() for choice in self._choices]
        told: dict[str, Any] = {}
        if self._reports_prompt:
            vocabulary = self._loaded.model.target.vocabulary
            prompts = [prompt_logprobs(vocabulary, r.prompt_logprobs) for r in self._in_order()]
            if "message" in choices[0]:
                told = {"prompt_logprobs": prompts[0]}
            else:
                choices = [
                    {**choice, "prompt_logprobs": prompt}
                    for choice, prompt in zip(choices, prompts, strict=True)
                ]
        return {**self._head(self._kind), "choices": choices, **told, **self._costs()}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The pieces of all answers. The last chunk tells their costs."""
        head = self._head(self._chunk_kind)
        no_usage = {"usage": None} if self._told.include_usage else {}
        async for index, chunk in stream_all(self._loaded, self._tasks):
            if chunk.prompt is not None:
                told = prompt_progress(chunk.prompt, timed=bool(self._running))
                yield {**head, "choices": [], **no_usage, **told}
                continue
            pieces = list(self._choices[index].pieces(chunk))
            if chunk.result is not None:
                self._results[index] = chunk.result
            beside = no_usage | self._so_far(index, chunk)
            if len(self._results) == len(self._tasks) and not self._told.include_usage:
                beside |= {"timings": timings(self._in_order()), **self._beside}
            for piece in pieces[:-1]:
                yield {**head, **piece, **no_usage}
            if pieces:
                yield {**head, **pieces[-1], **beside}
        if self._told.include_usage:
            yield {**head, "choices": [], **self._costs()}

    def _in_order(self) -> list[Result]:
        return [self._results[index] for index in range(len(self._tasks))]

    def _so_far(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Usage and timings, where each chunk is to tell them."""
        fields: dict[str, Any] = {}
        self._n_tokens[index] += len(chunk.tokens)
        if self._told.continuous_usage_stats:
            fields["usage"] = _counts(n_cells(self._tasks[index].prompt), self._n_tokens[index])
        if self._running:
            fields["timings"] = self._running[index].take(chunk)
        return fields

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._loaded.name,
            "system_fingerprint": _system_fingerprint(self._loaded.model),
        }

    def _costs(self) -> dict[str, Any]:
        costs = {"usage": self._usage(), "timings": timings(self._in_order())}
        return {**costs, **self._beside}

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many answers it has; cached are those of its tokens that
        none of them had to compute. Drafts are not OpenAI's `prediction`: `timings` has them."""
        results, n = self._in_order(), self._per_prompt
        groups = [results[i : i + n] for i in range(0, len(results), n)]
        prompt = sum(group[0].stats.prompt_tokens for group in groups)
        cached = sum(min(result.stats.cached_tokens for result in group) for group in groups)
        completion = sum(len(result.tokens) for result in results)
        fields: dict[str, Any] = {
            **_counts(prompt, completion),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        reasoning = [choice.n_reasoning_tokens for choice in self._choices]
        counted = [n for n in reasoning if n is not None]
        if counted:
            fields["completion_tokens_details"] = {"reasoning_tokens": sum(counted)}
        return fields


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _system_fingerprint(model: Model) -> str:
    """Differs where the same seed may give another answer: by model, how it is loaded, versions.

    Its loading includes the number of requests that share the context, and the layers' places. As
    llama-server's it begins with `b` and the version of llama.cpp.
    """
    parts = (
        version(),
        metadata.version("llama_cpp_python"),
        model.target.path.name,
        repr(model.target.options),
    )
    made_of = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return f"b{runtime.llama_version()}-{made_of}"
