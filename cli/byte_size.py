"""A count of bytes in words."""

from __future__ import annotations


def byte_size(n_bytes: int) -> str:
    """Such as "816.0 KiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} bytes"
