"""What a model is doing and has done, for whoever looks at it from outside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlotStatus:
    """One slot: whether a sequence is at work in it, and how many tokens its caches hold."""

    id: int
    busy: bool
    n_cached_tokens: int


@dataclass(frozen=True)
class ModelStatus:
    """A model at one moment, and totals since it was loaded.

    `n_busy` sequences are at work and `n_waiting` requests wait for a slot. Of `n_ctx` cells,
    `cells_used` hold a token, of free slots too. `requests` are those that have ended; tokens,
    rounds and drafts are counted as in `Stats`, those of running sequences included, and `prompt_s`
    and `decode_s` are sums over requests, which may have run at once. `cache_bytes` are what the
    store of prefixes that left their slot holds, `cache_hits` how often one was taken from it.
    """

    n_slots: int
    n_busy: int
    n_waiting: int
    slots: tuple[SlotStatus, ...]
    n_ctx: int
    cells_used: int
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    emitted: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    position_drafted: tuple[int, ...] = ()
    position_accepted: tuple[int, ...] = ()
    prompt_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: int = 0
    cache_hits: int = 0
