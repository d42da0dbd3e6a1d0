"""A server that writes a line for each step of its event loop that takes long.

Time of the CPU, so that other processes do not count: only the loop's own thread does.
"""

import asyncio
import os
import sys
import time
from typing import Any

from dflash_local.cli import main

COMMAND = (sys.executable, __file__, "serve", "--port", "0")
LONG_S = float(os.environ.get("STALL_S", "0.3"))
"""Of the loop's CPU time; under 0.1 on a quiet machine. The known stall took 10 s."""

_run = asyncio.events.Handle._run


def timed_run(handle: asyncio.events.Handle) -> Any:
    start = time.thread_time()
    result = _run(handle)
    took = time.thread_time() - start
    if took > LONG_S:
        print(f"stalled for {1000 * took:.0f} ms", file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    asyncio.events.Handle._run = timed_run  # type: ignore[method-assign]
    main.main()
