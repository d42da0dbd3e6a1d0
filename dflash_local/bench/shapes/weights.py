"""Random weights in ggml's types, as fast as they can be written.

Quantising gigabytes would take minutes. So of each type a pool of some megabytes is drawn and
quantised, and tensors are cut from it one after another. Each time round, its blocks come in
another order. Otherwise rows of a large matrix would be equal, and so would the logits of many
tokens: a sampler has to look at all logits to break such ties, which no trained model has.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from dflash_local.convert.quantization import encode

_N_BLOCKS = {256: 16_381, 32: 131_071, 1: 4_194_301}
"""Blocks of a pool, by the values in a block, for 4 million values. They are primes, so that any
step from block to block goes through all of them."""


class RandomWeights:
    """Weights of standard deviation `std`: the same for the same seed and order of calls."""

    def __init__(self, std: float, seed: int = 0) -> None:
        self._std = std
        self._seed = seed
        self._pools: dict[Type, NDArray[np.uint8]] = {}  # [blocks, bytes]
        self._rounds: dict[Type, int] = {}
        self._left: dict[Type, memoryview] = {}

    def take(self, kind: Type, n_bytes: int) -> Iterator[memoryview]:
        """The next `n_bytes` of a type, whole blocks, in pieces of at most a pool."""
        while n_bytes:
            left = self._left.get(kind) or self._next_round(kind)
            n = min(n_bytes, len(left))
            yield left[:n]
            self._left[kind] = left[n:]
            n_bytes -= n

    def _next_round(self, kind: Type) -> memoryview:
        """All blocks of the pool, with a step from one to the next that no round before had."""
        if kind not in self._pools:
            blocks = np.frombuffer(self._draw(kind), np.uint8)
            self._pools[kind] = blocks.reshape(_N_BLOCKS[GGML_QUANT_SIZES[kind][0]], -1)
        pool = self._pools[kind]
        step = self._rounds[kind] = self._rounds.get(kind, 0) + 1
        order = np.arange(len(pool), dtype=np.int64) * step % len(pool)
        return pool[order].reshape(-1).data

    def _draw(self, kind: Type) -> bytes:
        n_values, _ = GGML_QUANT_SIZES[kind]
        random = np.random.default_rng([self._seed, int(kind)])
        values = random.standard_normal(_N_BLOCKS[n_values] * n_values, dtype=np.float32)
        values *= np.float32(self._std)
        return encode(values.reshape(-1, n_values) if n_values > 1 else values[None], kind)
