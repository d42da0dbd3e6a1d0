"""The gain of drafts over a network: the tiny pair over two workers on loopback, with delays.

python3 lab/rpc.py [--floats] [--gpu] [DELAY_MS ...]

--floats: the same pair with weights in F32 and F16. A pass of one row then waits for its weights to
come from memory, as that of a large model does, and one of eight takes little longer.
--gpu: both workers compute on CUDA0, and a third of the layers is there without a worker.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import gguf
import numpy as np

import dflash_local
import tiny_coder
from dflash_local import Model
from gguf_files import Tensor, changed
from rpc_workers import Networks, worker_processes

N_TOKENS = 64
N_PROMPTS = 2  # of each kind
N_RUNS = 4
"""Of each prompt, the fastest counts: other programs use the cores, too."""
WAYS: dict[str, dict[str, object]] = {
    "plain": {"draft_width": 0},
    "width 8": {"draft_width": 8},
    "auto": {"draft_width": "auto"},
}


def measure(model: Model, networks: list[Any], how: dict[str, object]) -> str:
    """Tokens a second, waits and bytes a pass, and tokens a round, over its prompts."""
    seconds, n_tokens, n_passes = 0.0, 0, 0
    begin = [net.counts() for net in networks]
    for prompt in [texts[i] for texts in tiny_coder.prompts().values() for i in range(N_PROMPTS)]:
        times = []
        for _ in range(N_RUNS):
            start = time.monotonic()
            found = model.generate(prompt, max_tokens=N_TOKENS, temperature=0, **how)  # type: ignore[arg-type]
            times.append(time.monotonic() - start)
        seconds += min(times)
        n_tokens += len(found.tokens)
        n_passes += round(len(found.tokens) / found.stats.tokens_per_round)
    end = [net.counts() for net in networks]
    n_waits, n_bytes = (sum(e[i] - b[i] for b, e in zip(begin, end, strict=True)) for i in (0, 1))
    return (
        f"{n_tokens / seconds:6.1f} tokens/s, {1000 * seconds / n_passes:.1f} ms, "
        f"{n_waits / n_passes / N_RUNS:.2f} waits and {n_bytes / n_passes / N_RUNS / 1024:.0f} KiB "
        f"a pass, {n_tokens / n_passes:.2f} tokens a pass"
    )


def in_floats(folder: Path) -> list[Path]:
    """tiny-coder with the target's weights in F32, and the drafter's in F16."""

    def widened(tensors: dict[str, Tensor], kind: gguf.GGMLQuantizationType) -> None:
        for name, (data, stored) in tensors.items():
            if stored != gguf.GGMLQuantizationType.F32:
                weights = gguf.dequantize(data, stored)
                is_half = kind == gguf.GGMLQuantizationType.F16
                tensors[name] = (weights.astype(np.float16) if is_half else weights, kind)

    kinds = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
    return [
        changed(source, folder / source.name, tensors=lambda found, kind=kind: widened(found, kind))
        for source, kind in zip(tiny_coder.pair(), kinds, strict=True)
    ]


def main(pair: Sequence[Path], delays_ms: list[float], *, gpu: bool) -> None:
    device = "CUDA0" if gpu else "CPU"
    with worker_processes(2, device) as processes, Networks() as host:
        networks = [host.SlowNetwork(worker.port) for worker in processes]
        with dflash_local.load(
            *pair,
            rpc=[net.name() for net in networks],
            tensor_split=[1, 1, 1] if gpu else [1, 1],
            draft_shape="chain",
            kv_type="q8_0",
            n_ctx=2048,
            n_threads=1,
            quiet=True,
        ) as model:
            for delay in delays_ms:
                for net in networks:
                    net.delay(delay / 1000)
                for name, how in WAYS.items():
                    print(f"{delay:g} ms, {name}: {measure(model, networks, how)}", flush=True)


if __name__ == "__main__":
    delays = [float(each) for each in sys.argv[1:] if not each.startswith("-")]
    with tempfile.TemporaryDirectory() as folder:
        pair = in_floats(Path(folder)) if "--floats" in sys.argv else tiny_coder.pair()
        main(pair, delays or [0, 0.2, 1], gpu="--gpu" in sys.argv)
