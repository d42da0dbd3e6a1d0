"""The common part of answers of `/v1/chat/completions` and `/v1/completions`: an object with a
choice for each answer, and their costs."""

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Any, Protocol

from dflash_local.llama import runtime
from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.generation import (
    GenerationTask,
    RunningTimings,
    prompt_progress,
    stream_all,
    timings,
)
from dflash_local.server.answering.token_logprobs import prompt_logprobs
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.openai.choices_schema import ChoicesRequest, StreamOptions
from dflash_local.target_model.images import n_cells
from dflash_local.version import version


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
