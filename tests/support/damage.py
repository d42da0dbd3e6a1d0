"""Random damage to bytes, and values of JSON that are hostile."""

import random
from typing import Any

HOSTILE: list[Any] = [
    *(-1, 0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 10**30, 0.5, 1e400, True, None, "", "x" * 500),
    *("\ud800", "\x00", "a\nb", [], [[]], [1] * 50, [2**40] * 8, {}, {"a": 1}, "F32", "F64", "Q8"),
]


def damaged_bytes(data: bytes, rng: random.Random, end: int) -> bytes:
    """`data` with a few bytes changed before `end`, cut, repeated, or put in."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        at = rng.randrange(min(end, len(out)) or 1) if out else 0
        match rng.randrange(6):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + rng.randrange(1, 16)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 16))
            case 4:
                del out[rng.randrange(len(out) + 1) :]
            case 5:
                out[at:at] = out[at : at + rng.randrange(1, 64)]
    return bytes(out)
