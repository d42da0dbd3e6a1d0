"""From checked options to answers: several at once, seeds, clients that leave.

Every API makes `Task`s, and reads the chunks of all of them from `stream_all`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import anyio.to_thread
from fastapi import Request, Response

from dflash_local.result import Chunk
from dflash_local.server.http.tally import record
from dflash_local.server.models.served import Served
from dflash_local.worker.job import AsyncChunks

T = TypeVar("T")
P = ParamSpec("P")

_N_SEEDS = 2**32 - 1
_GONE = 499
"""nginx's status for a client that has left. Nobody reads it but the log."""


@dataclass(frozen=True)
class Task:
    """One answer to generate: token ids of the prompt, keyword arguments of `Model.astream`."""

    prompt: list[int]
    options: dict[str, Any]


def choices(prompt: list[int], options: dict[str, Any], n: int) -> list[Task]:
    """`n` answers to one prompt. A seed is the first one's; the others count on from it."""
    seed = options.get("seed")
    if seed is None:
        return [Task(prompt, options)] * n
    return [Task(prompt, {**options, "seed": (seed + i) % _N_SEEDS}) for i in range(n)]


async def stream_all(served: Served, tasks: Sequence[Task]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of all tasks, with their numbers, as they come.

    What is wrong with any of them is raised before the first chunk. Closing the iterator, or an
    error of one task, ends them all within one round.
    """
    items: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue()

    async def pump(index: int, chunks: AsyncChunks) -> None:
        try:
            async for chunk in chunks:
                if chunk.result is not None:
                    record(served.name, chunk.result)
                items.put_nowait((index, chunk))
            items.put_nowait((index, None))
        except Exception as error:
            items.put_nowait((index, error))

    streams: list[AsyncChunks] = []
    pumps: list[asyncio.Future[None]] = []
    try:
        for task in tasks:
            options = {"queue_timeout": served.queue_timeout_s, **task.options}
            streams.append(await served.model.asubmit(task.prompt, **options))
        pumps = [asyncio.ensure_future(pump(i, chunks)) for i, chunks in enumerate(streams)]
        left = len(pumps)
        while left:
            index, item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for chunks in streams:
            chunks.cancel()
        for running in pumps:
            running.cancel()
        if pumps:
            await asyncio.wait(pumps)


async def off_loop(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work` on another thread: tokenising, rendering and compiling may take long."""
    return await anyio.to_thread.run_sync(functools.partial(work, *args, **kwargs))


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response of `work`, which is cancelled when the client leaves before there is one."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=_GONE)
    finally:
        gone.cancel()
        answer.cancel()
        await asyncio.wait({gone, answer})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
