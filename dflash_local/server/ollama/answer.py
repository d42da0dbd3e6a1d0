"""Answers as Ollama's API words them: a line of JSON for each piece, or one for the whole."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic_core import from_json

from dflash_local.server.answering.chat_answer import ChatAnswer
from dflash_local.server.answering.generation import Task, stream_all
from dflash_local.server.answering.prepared_chat import Conversation
from dflash_local.server.answering.sampling_fields import sampling_options
from dflash_local.server.models.served import Served
from dflash_local.server.ollama.model_list import tagged
from dflash_local.server.ollama.schema import OllamaRequest

Shape = Callable[[Mapping[str, Any]], dict[str, Any]]
"""From `content`, `thinking` and `tool_calls` to the fields that tell of them."""


def in_message(said: Mapping[str, Any]) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": "", **said}}


def in_response(said: Mapping[str, Any]) -> dict[str, Any]:
    thought = {"thinking": said["thinking"]} if "thinking" in said else {}
    return {"response": said.get("content", ""), **thought}


def no_answer(name: str, shape: Shape, reason: Literal["load", "unload"]) -> Response:
    """To a request that only wants the model of that name to be there, or to be gone."""
    return JSONResponse({**_head(name), **shape({}), "done_reason": reason, "done": True})


class OllamaAnswer:
    """The answer to one request that came at `begun`, by `time.monotonic`."""

    def __init__(
        self,
        served: Served,
        body: OllamaRequest,
        conversation: Conversation,
        shape: Shape,
        begun: float,
    ) -> None:
        self._begun = begun
        self._loaded = time.monotonic()
        self._served = served
        self._shape = shape
        sampling = body.sampling
        options = {
            **sampling_options(sampling),
            **conversation.options,
            "max_tokens": sampling.limit,
        }
        if conversation.dialect.stop:
            options["stop"] = (*sampling.stop_texts, *conversation.dialect.stop)
        self._task = Task(conversation.prompt, options)
        self._answer = ChatAnswer(served.model, conversation, logprobs=False)
        self._thinking = body.think is not False
        self._call: dict[str, Any] | None = None
        self._n_calls = 0

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """A line for each piece, and one with the costs."""
        async for said in self._pieces():
            yield {**_head(self._served.name), **self._shape(said), "done": False}
        yield {**_head(self._served.name), **self._shape({}), **self._end()}

    async def whole(self) -> Response:
        told: dict[str, Any] = {}
        async for said in self._pieces():
            for name, value in said.items():
                told[name] = told[name] + value if name in told else value
        return JSONResponse({**_head(self._served.name), **self._shape(told), **self._end()})

    async def _pieces(self) -> AsyncIterator[dict[str, Any]]:
        async for _, chunk in stream_all(self._served, [self._task]):
            for delta in self._answer.take(chunk):
                for said in self._said(delta):
                    yield said
        for said in self._called():
            yield said

    def _said(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What a delta of a chat's message says. A call is told once it is complete."""
        if self._thinking and delta.get("reasoning_content"):
            yield {"thinking": delta["reasoning_content"]}
        if delta.get("content"):
            yield from self._called()
            yield {"content": delta["content"]}
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield from self._called()
                self._call = {"id": call["id"], "name": function["name"], "arguments": ""}
            if self._call is not None:
                self._call["arguments"] += function["arguments"]

    def _called(self) -> Iterator[dict[str, Any]]:
        """The call that is open, if one is. One that was cut off is nobody's to make."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            arguments = from_json(call["arguments"], allow_inf_nan=False)
        except ValueError:
            return
        function = {"index": self._n_calls, "name": call["name"], "arguments": arguments}
        self._n_calls += 1
        yield {"tool_calls": [{"id": call["id"], "function": function}]}

    def _end(self) -> dict[str, Any]:
        """Why the answer ended, and its costs: times in nanoseconds, `load_duration` that until the
        model was loaded and it was the request's turn."""
        result = self._answer.result
        stats = result.stats
        return {
            "done": True,
            "done_reason": result.finish_reason,
            "total_duration": _ns(time.monotonic() - self._begun),
            "load_duration": _ns(self._loaded - self._begun + stats.queue_s),
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": _ns(stats.prompt_s),
            "eval_count": len(result.tokens),
            "eval_duration": _ns(stats.decode_s),
        }


def _head(name: str) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    return {"model": tagged(name), "created_at": now.replace("+00:00", "Z")}


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
