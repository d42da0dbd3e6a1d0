"""A loaded model, as requests have it."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.model import Model


@dataclass(frozen=True)
class Served:
    """`name` is what answers call the model. `queue_timeout_s`: seconds that a request may wait for
    its turn, None for any time."""

    name: str
    model: Model
    queue_timeout_s: float | None = None
