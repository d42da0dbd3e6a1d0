"""What drafts gain over a network: the tiny pair over two workers on loopback, with delays.

python3 lab/rpc.py [DELAY_MS ...]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import dflash_local
from dflash_local import Model, demo
from rpc_workers import Networks, worker_processes

N_TOKENS = 96
N_ROUNDS = 3
WAYS: dict[str, dict[str, object]] = {
    "plain": {"draft_width": 0},
    "width 8": {"draft_width": 8},
    "auto": {"draft_width": "auto"},
}


def measure(model: Model, networks: list[Any], how: dict[str, object]) -> str:
    """Tokens a second, waits and bytes a pass, and tokens a round, over the shipped prompts."""
    seconds, n_tokens, n_passes = 0.0, 0, 0
    begin = [net.counts() for net in networks]
    for prompt in [texts[i] for texts in demo.prompts().values() for i in range(N_ROUNDS)]:
        start = time.monotonic()
        found = model.generate(prompt, max_tokens=N_TOKENS, temperature=0, **how)  # type: ignore[arg-type]
        seconds += time.monotonic() - start
        n_tokens += len(found.tokens)
        n_passes += round(len(found.tokens) / found.stats.tokens_per_round)
    end = [net.counts() for net in networks]
    n_waits, n_bytes = (sum(e[i] - b[i] for b, e in zip(begin, end, strict=True)) for i in (0, 1))
    return (
        f"{n_tokens / seconds:6.1f} tokens/s, {n_waits / n_passes:.2f} waits and "
        f"{n_bytes / n_passes / 1024:.0f} KiB a pass, {n_tokens / n_passes:.2f} tokens a pass"
    )


def main(delays_ms: list[float]) -> None:
    with worker_processes(2) as processes, Networks() as host:
        networks = [host.SlowNetwork(worker.port) for worker in processes]
        with dflash_local.load(
            *demo.pair(),
            rpc=[net.name() for net in networks],
            tensor_split=[1, 1],
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
                    measure(model, [], how)
                    print(f"{delay:g} ms, {name}: {measure(model, networks, how)}", flush=True)


if __name__ == "__main__":
    main([float(each) for each in sys.argv[1:]] or [0, 0.2, 1])
