"""A server of the tiny pair with very short limits, which users cannot set.

Tests run it as a process, `COMMAND`; apart from the limits it does what `dflash-local serve` does.
`READ_S` of its environment makes it wait longer for its clients.
"""

import os
import sys

import tiny_coder
from dflash_local.server import lifecycle
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import ModelSource

COMMAND = (sys.executable, __file__)

_READ_S = float(os.environ.get("READ_S", "1"))
SETTINGS = ServerSettings(
    port=0,
    drain_s=_READ_S,
    max_connections=8,
    send_buffer=4096,
    head_s=1.0,
    body_s=1.0,
    read_s=_READ_S,
    keep_alive_s=1.0,
)


def main() -> int:
    """Serve until a signal comes; the exit code."""
    with lifecycle.bind(SETTINGS) as bound:
        target, drafter = tiny_coder.pair()
        options = {"n_threads": 1, "n_gpu_layers": 0, "n_seq": 1}
        source = ModelSource(target.stem, target, drafter, options, max_queue=1)
        pool = ModelPool([source], queue_timeout_s=1.0)
        pool.adopt(source.name, source.load())
        return lifecycle.serve(
            pool, SETTINGS, bound, lambda line: print(line, file=sys.stderr, flush=True)
        )


if __name__ == "__main__":
    sys.exit(main())
