"""A server of four models on a machine that has memory for two of them.

Tests run it as a process, `COMMAND`. It does what `dflash-local serve` does, except that it is told
the free memory: that of such a machine beside the loaded models.
"""

import sys
from collections.abc import Sequence

import tiny_coder
from dflash_local.llama.runtime import Device
from dflash_local.server import lifecycle
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.keep_alive import FOREVER
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import ModelSource

COMMAND = (sys.executable, __file__)
NAMES = ("a", "b", "c", "d")
OPTIONS = {"n_ctx": 1024, "n_threads": 1, "n_gpu_layers": 0, "n_seq": 2, "draft_width": 0}
_MIB = 1 << 20
_MARGIN = 256 * _MIB  # that a plan leaves free
_NEEDED = 2.5
"""So many models would fit."""


def main() -> int:
    """Serve until a signal comes; the exit code."""
    target, drafter = tiny_coder.pair()
    sources = [ModelSource(name, target, drafter, OPTIONS, max_queue=1) for name in NAMES]
    plain = Device("CPU", "a CPU", "cpu", 1 << 40, 1 << 40)
    needed = sources[0].planner()([plain]).host.needed
    total = _MARGIN + int(_NEEDED * needed)

    def devices() -> Sequence[Device]:
        n_loaded = sum(served.model is not None for served in pool.models.values())
        return [Device("CPU", "a CPU", "cpu", total - n_loaded * needed, total)]

    pool = ModelPool(sources, keep_alive_s=FOREVER, queue_timeout_s=60, devices=devices)
    # Little, so that a client that does not read delays an answer.
    settings = ServerSettings(port=0, send_buffer=4096)
    with lifecycle.bind(settings) as bound:
        return lifecycle.serve(
            pool, settings, bound, lambda line: print(line, file=sys.stderr, flush=True)
        )


if __name__ == "__main__":
    sys.exit(main())
