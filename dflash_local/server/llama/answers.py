"""Answers as llama-server's own API words them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from dflash_local.errors import ClosedError
from dflash_local.result import Chunk, Result
from dflash_local.sampling.params import TokenLogprob
from dflash_local.server.answering.generation import Task, off_loop, stream_all
from dflash_local.server.answering.sampling_fields import sampling_options
from dflash_local.server.answering.stop_text import stop_text
from dflash_local.server.answering.usage import timings
from dflash_local.server.http.event_stream import event_form
from dflash_local.server.llama.line_limits import LineLimits
from dflash_local.server.llama.schema import LlamaRequest
from dflash_local.server.models.served import Served

EVENTS = event_form(done=None)


def llama_options(body: LlamaRequest) -> dict[str, Any]:
    """Keyword arguments of `Model.astream`, but for the end of a line that comes too late."""
    options = sampling_options(body)
    options.pop("deadline_s", None)  # an answer that is cut in mid-line is of no use to an editor
    # Reading a prompt into the cache ends with a token that nobody asked for.
    options["max_tokens"] = None if body.n_predict < 0 else max(body.n_predict, 1)
    if body.json_schema is not None:
        options["json_schema"] = body.json_schema
    if body.n_probs:
        options["logprobs"] = body.n_probs
    return options


class LlamaAnswers:
    """The answers to all tasks of a request: one as an object, several as a list."""

    def __init__(self, served: Served, body: LlamaRequest, tasks: Sequence[Task]) -> None:
        self._served = served
        self._answers = [_Answer(served, body, task, i) for i, task in enumerate(tasks)]

    async def events(self) -> AsyncIterator[Mapping[str, Any]]:
        """Those of all answers, as they come."""
        tasks = [answer.task for answer in self._answers]
        async for index, chunk in stream_all(self._served, tasks):
            for event in self._answers[index].take(chunk):
                yield event

    async def whole(self) -> Response:
        async for _ in self.events():
            pass
        return await off_loop(self._told)

    def _told(self) -> Response:
        """All of them. With log-probabilities they are long, and take their time to be written."""
        bodies = [answer.whole() for answer in self._answers]
        return JSONResponse(bodies[0] if len(bodies) == 1 else bodies)


class _Answer:
    """One answer on its way: the engine's chunks in, events out, at the end the whole."""

    def __init__(self, served: Served, body: LlamaRequest, task: Task, index: int) -> None:
        self._cancel = threading.Event()
        self.task = Task(task.prompt, {**task.options, "cancel": self._cancel})
        self._body = body
        self._index = index
        self._model = served.model
        self._name = served.name
        self._limits = LineLimits(body.n_indent, (body.t_max_predict_ms or 0) / 1000)
        self._text: list[str] = []
        self._n_tokens = 0
        self._unsent: list[int] = []
        self._unsent_logprobs: list[TokenLogprob] = []
        self._result: Result | None = None

    def take(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """The events of a chunk: one if there is text to show, and the last one at the end."""
        self._n_tokens += len(chunk.tokens)
        self._unsent += chunk.tokens
        self._unsent_logprobs += chunk.logprobs
        text = self._limits.take(chunk.text)
        if chunk.result is not None:
            if chunk.result.finish_reason == "cancelled" and not self._cancel.is_set():
                raise ClosedError("the model was closed in the middle of this answer")
            text += self._limits.rest()
        elif self._limits.ended:
            self._cancel.set()
        if self._body.n_predict == 0:
            text = ""
        if text:
            self._text.append(text)
            yield self._partial(text)
        if chunk.result is not None:
            self._result = self._answered(chunk.result)
            yield self._chosen({**self._last(), "content": "", "tokens": []})

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        last = self._last()
        result = self._end
        if self._body.n_probs:
            last["completion_probabilities"] = self._probabilities(result.logprobs)
        return self._chosen(last)

    @property
    def _end(self) -> Result:
        if self._result is None:
            raise RuntimeError("the stream ended without its result")
        return self._result

    def _answered(self, result: Result) -> Result:
        if self._body.n_predict:
            return result
        return replace(result, text="", tokens=[], logprobs=[], finish_reason="length")

    def _partial(self, text: str) -> dict[str, Any]:
        event: dict[str, Any] = {
            "index": self._index,
            "content": text,
            "tokens": self._unsent,
            "stop": False,
            "tokens_predicted": self._n_tokens,
            "tokens_evaluated": len(self.task.prompt),
        }
        if self._body.n_probs:
            event["completion_probabilities"] = self._probabilities(self._unsent_logprobs)
        self._unsent, self._unsent_logprobs = [], []
        return event

    def _last(self) -> dict[str, Any]:
        result = self._end
        text = "".join(self._text)
        stop_type, word = self._stop(result)
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
            "prompt": self._model.target.vocabulary.detokenize(self.task.prompt, special=True),
            "has_new_line": "\n" in text,
            "truncated": result.finish_reason == "length" and n != max(self._body.n_predict, 0),
            "stop_type": stop_type,
            "stopping_word": word,
            "timings": timings(result),
        }

    def _stop(self, result: Result) -> tuple[str, str]:
        """What ended the answer, and the stop text that did."""
        if self._limits.ended or result.finish_reason != "stop":
            return "limit", ""
        word = stop_text(self._model.target.vocabulary, result, self._body.stop_texts)
        return ("eos", "") if word is None else ("word", word)

    def _settings(self, result: Result) -> dict[str, Any]:
        options = {k: v for k, v in self.task.options.items() if k not in ("cancel", "logprobs")}
        biases = options.pop("logit_bias", {})
        options["max_tokens"] = self._body.n_predict
        return {
            **options,
            "seed": result.seed,
            "stop": list(self._body.stop_texts),
            "n_predict": self._body.n_predict,
            "n_probs": self._body.n_probs,
            "n_ctx": self._model.n_ctx,
            "logit_bias": [{"token": t, "bias": max(b, -1e30)} for t, b in biases.items()],
            "stream": self._body.stream,
        }

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields that were asked for; one of an inner object keeps its path as its name."""
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
        return [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for entry in logprobs
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._model.target.vocabulary.piece(token, special=True)
        return {
            "id": token,
            "token": piece.decode("utf-8", "replace"),
            "bytes": list(piece),
            "logprob": max(logprob, -1e30),  # JSON has no infinity
        }
