"""What the answers of `/v1/chat/completions` and `/v1/completions` have in common: an object with a
choice for each answer, and what they cost."""

from __future__ import annotations

import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib import metadata
from typing import Any, ClassVar

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.generation import (
    GenerationTask,
    RunningTimings,
    stream_all,
    timings,
)
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.openai.choices_schema import ChoicesRequest
from dflash_local.version import version


class ChoicesAnswer(ABC):
    """The answers to all tasks of a request. Each `per_prompt` neighbours answer one prompt.
    `body` says what a stream tells besides them: with `include_usage` its last chunk the usage,
    with `continuous_usage_stats` each chunk, with `timings_per_token` each chunk the time."""

    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    ID_PREFIX: ClassVar[str]

    def __init__(
        self,
        loaded: LoadedModel,
        tasks: Sequence[GenerationTask],
        *,
        per_prompt: int,
        body: ChoicesRequest,
    ) -> None:
        self._loaded = loaded
        self._tasks = tasks
        self._per_prompt = per_prompt
        self._include_usage = body.include_usage
        self._continuous = body.continuous_usage
        self._n_tokens = [0] * len(tasks)
        self._running = [RunningTimings() for _ in tasks] if body.timings_per_token else []

    @abstractmethod
    def _take(self, index: int, chunk: Chunk) -> None:
        """Take in what the model has added to an answer that is to be told as a whole."""

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]:
        """The choice of a complete answer."""

    @abstractmethod
    def _pieces(self, index: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """What the model has added to an answer, as fields of the chunks of a stream. The last
        chunk of an answer gives at least one piece."""

    @abstractmethod
    def _results(self) -> list[Result]:
        """The results of the answers that are complete."""

    def _n_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning in all answers; None where the API has no reasoning."""
        return None

    async def whole(self) -> Response:
        head = self._head(self.KIND)
        async for index, chunk in stream_all(self._loaded, self._tasks):
            self._take(index, chunk)
        return await run_in_threadpool(self._response, head)

    def _response(self, head: dict[str, Any]) -> Response:
        """The whole answer. With log-probabilities it is long, and takes a while to write."""
        choices = [self._choice(index) for index in range(len(self._tasks))]
        return JSONResponse({**head, "choices": choices, **self._costs()})

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The pieces of all answers. The last chunk tells what they cost."""
        head = self._head(self.CHUNK_KIND)
        no_usage = {"usage": None} if self._include_usage else {}
        left = len(self._tasks)
        async for index, chunk in stream_all(self._loaded, self._tasks):
            pieces = list(self._pieces(index, chunk))
            left -= chunk.result is not None
            beside = no_usage | self._so_far(index, chunk)
            if not left and not self._include_usage:
                beside["timings"] = timings(self._results())
            for piece in pieces[:-1]:
                yield {**head, **piece, **no_usage}
            if pieces:
                yield {**head, **pieces[-1], **beside}
        if self._include_usage:
            yield {**head, "choices": [], **self._costs()}

    def _so_far(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Usage and timings, where each chunk is to tell them."""
        fields: dict[str, Any] = {}
        self._n_tokens[index] += len(chunk.tokens)
        if self._continuous:
            prompt = len(self._tasks[index].prompt)
            n = self._n_tokens[index]
            fields["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": n,
                "total_tokens": prompt + n,
            }
        if self._running:
            fields["timings"] = self._running[index].take(chunk)
        return fields

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.ID_PREFIX}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._loaded.name,
            "system_fingerprint": _system_fingerprint(self._loaded.model),
        }

    def _costs(self) -> dict[str, Any]:
        return {"usage": self._usage(), "timings": timings(self._results())}

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many answers it has; cached are those of its tokens that
        none of them had to compute. Drafts are not OpenAI's `prediction`: `timings` has them."""
        results, n = self._results(), self._per_prompt
        groups = [results[i : i + n] for i in range(0, len(results), n)]
        prompt = sum(group[0].stats.prompt_tokens for group in groups)
        cached = sum(min(result.stats.cached_tokens for result in group) for group in groups)
        completion = sum(len(result.tokens) for result in results)
        fields: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        reasoning = self._n_reasoning_tokens()
        if reasoning is not None:
            fields["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return fields


def _system_fingerprint(model: Model) -> str:
    """Differs where the same seed may give another answer: by model, how it is loaded, versions.

    How it is loaded includes how many requests share the context, and where the layers lie.
    """
    parts = (
        version(),
        metadata.version("llama_cpp_python"),
        model.target.path.name,
        repr(model.target.options),
    )
    return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
