"""Threads that prepare the requests of one model: they render, tokenise and count.

They are this model's own, so that no other model waits for them. Long requests have theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from dflash_local.server.http.bodies import body_bytes

P = ParamSpec("P")
T = TypeVar("T")

_SHORT = 4
_LONG = 2
_LONG_BYTES = 64 << 10
"""Of a body. A text of that length is tokenised in some 50 ms, whatever it says."""


class RequestThreads:
    """A long request waits for long ones only, and a short one for short ones."""

    def __init__(self, model: str) -> None:
        self._short = ThreadPoolExecutor(_SHORT, f"dflash-local requests {model}")
        self._long = ThreadPoolExecutor(_LONG, f"dflash-local long requests {model}")

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, for the request that is being answered. One that is given up
        leaves the queue."""
        threads = self._long if body_bytes.get() > _LONG_BYTES else self._short
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, partial(work, *args, **kwargs))
