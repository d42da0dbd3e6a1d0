"""Random weights in ggml's types, as fast as they can be written.

Quantising gigabytes would take minutes. So of each type a pool of some megabytes is drawn and
quantised, and tensors are cut from it one after another. The pool has a prime number of blocks, so
that the rows of a matrix repeat only after as many rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from dflash_local.convert.quantize import encode

_N_BLOCKS = {256: 16_381, 32: 131_071, 1: 4_194_301}
"""Blocks of a pool, by the values in a block: primes that make 4 million values."""


class RandomWeights:
    """Weights of standard deviation `std`: the same for the same seed and order of calls."""

    def __init__(self, std: float, seed: int = 0) -> None:
        self._std = std
        self._seed = seed
        self._pools: dict[Type, bytes] = {}
        self._places: dict[Type, int] = {}

    def take(self, kind: Type, n_bytes: int) -> Iterator[memoryview]:
        """The next `n_bytes` of a type, whole blocks, in pieces of at most a pool."""
        if kind not in self._pools:
            self._pools[kind] = self._draw(kind)
        pool, place = memoryview(self._pools[kind]), self._places.get(kind, 0)
        while n_bytes:
            n = min(n_bytes, len(pool) - place)
            yield pool[place : place + n]
            n_bytes -= n
            place = (place + n) % len(pool)
        self._places[kind] = place

    def _draw(self, kind: Type) -> bytes:
        n_values, _ = GGML_QUANT_SIZES[kind]
        random = np.random.default_rng([self._seed, int(kind)])
        values = random.standard_normal(_N_BLOCKS[n_values] * n_values, dtype=np.float32)
        values *= np.float32(self._std)
        return encode(values.reshape(-1, n_values) if n_values > 1 else values[None], kind)
