"""Random weights in ggml's types, as fast as they can be written.

A block of a quantised type is a few bytes: scales, and codes of the values. Random codes under
fixed scales are finite and small, and nothing needs to be quantised. Of each type a pool of some
megabytes is drawn, and tensors are cut from it one after the other. A pool has a prime number of
blocks, so that rows begin at ever other places in it. Layouts are those of ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

_Type = GGMLQuantizationType
Bytes = NDArray[np.uint8]

_PRIMES = {256: 131_071, 32: 524_287, 1: 4_194_301}
"""Blocks of a pool by the number of values in a block: 9 to 28 MB."""

# Where a block keeps its scales (f16), and their size for values of standard deviation 1.
_SCALES: dict[GGMLQuantizationType, tuple[tuple[int, float], ...]] = {
    _Type.Q4_0: ((0, 1 / 4.6),),  # d * (q - 8), q of 4 bits
    _Type.Q5_0: ((0, 1 / 9.2),),  # d * (q - 16), q of 5 bits
    _Type.Q8_0: ((0, 1 / 73.9),),  # d * q, q of 8 bits
    # d * s * q - m * t, s and t of 6 bits, q of 4: m = 7.5 d makes the mean 0
    _Type.Q4_K: ((0, 1 / 258), (2, 7.5 / 258)),
    _Type.Q6_K: ((208, 1 / 1365),),  # d * s * (q - 32), s of 8 bits, q of 6
}
_MXFP4_STD = 5.85  # of its sixteen values, which are multiplied by 2^(e - 128)
_BF16_STD = 1.53  # of values with any sign and fraction, which are multiplied by 2^(e - 127)


class RandomBlocks:
    """Weights of standard deviation `std`, the same for the same seed and order of calls."""

    def __init__(self, std: float, seed: int = 0) -> None:
        self._std = std
        self._seed = seed
        self._pools: dict[GGMLQuantizationType, Bytes] = {}
        self._places: dict[GGMLQuantizationType, int] = {}

    def take(self, kind: GGMLQuantizationType, n_bytes: int) -> Iterator[memoryview]:
        """The next `n_bytes` of a type, whole blocks, in pieces of at most a pool."""
        if kind not in self._pools:
            self._pools[kind] = self._draw(kind)
        pool, place = self._pools[kind], self._places.get(kind, 0)
        while n_bytes:
            n = min(n_bytes, len(pool) - place)
            yield pool[place : place + n].data
            n_bytes -= n
            place = (place + n) % len(pool)
        self._places[kind] = place

    def _draw(self, kind: GGMLQuantizationType) -> Bytes:
        """A pool, flat."""
        n_values, n_bytes = GGML_QUANT_SIZES[kind]
        random = np.random.default_rng([self._seed, int(kind)])
        count = _PRIMES[n_values]
        if kind == _Type.F32:
            normal = random.standard_normal(count, dtype=np.float32)
            normal *= np.float32(self._std)
            return normal.view(np.uint8)
        blocks = random.integers(0, 256, (count, n_bytes), dtype=np.uint8)
        if kind == _Type.BF16:
            self._keep_small(blocks)
        elif kind == _Type.MXFP4:
            blocks[:, 0] = 128 + round(np.log2(self._std / _MXFP4_STD))
        else:
            for place, unit in _SCALES[kind]:
                scale = np.array([unit * self._std], np.float16)
                blocks[:, place : place + 2] = scale.view(np.uint8)
        return blocks.reshape(-1)

    def _keep_small(self, blocks: Bytes) -> None:
        """Any sign and fraction under one exponent: magnitudes from 2^e to 2^(e + 1)."""
        exponent = 127 + round(np.log2(self._std / _BF16_STD))
        values = blocks.view(np.uint16)
        values &= 0x807F
        values |= exponent << 7
