"""The chunks of an answer, for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dflash_local.result import Chunk
from dflash_local.worker.job import Job


class AsyncChunks:
    """The chunks of a job on an event loop. The job is cancelled when this object is freed.

    `submit` gets the job's sink, which raises RuntimeError once the event loop is closed.
    """

    def __init__(self, submit: Callable[[Callable[[Any], None]], Job]) -> None:
        items = self._items = asyncio.Queue[Any]()
        self._ended = False
        loop = asyncio.get_running_loop()

        def hand_over(item: Any) -> None:  # a reference to this object would keep it alive
            loop.call_soon_threadsafe(items.put_nowait, item)

        self._job = submit(hand_over)

    def cancel(self) -> None:
        """End the request within one round. Chunks from before may still come."""
        self._job.cancel()

    def __aiter__(self) -> AsyncChunks:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if item is not self._job:
            chunk: Chunk = item
            return chunk
        self._ended = True
        if self._job.error is not None:
            raise self._job.error
        raise StopAsyncIteration

    def __del__(self) -> None:
        if job := getattr(self, "_job", None):
            job.cancel()
