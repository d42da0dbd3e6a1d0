"""State of one answer, and of the slot whose caches it lives in. Token ids only, no text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dflash_local.sampling import Sampler, SamplingParams, TokenLogprob
from dflash_local.stats import Stats

FinishReason = Literal["stop", "length", "cancelled"]


def _never(_token: int) -> bool:
    return False


@dataclass(frozen=True)
class Request:
    """What to generate.

    `draft_width` are target rows per verify pass with the anchor; 0 (and 1) is plain decoding.
    `on_token` hears every token but an end of text, in order; True ends generation with it.
    """

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    draft_width: int = 0
    on_token: Callable[[int], bool] = _never

    @property
    def drafts(self) -> bool:
        return self.draft_width > 1


@dataclass
class Slot:
    """One sequence id of target and drafter, and what their caches hold.

    `cached` are the tokens in the target's cache by position. The drafter has the first
    `drafter.length(seq)` of them; while a sequence drafts, `pending` are the rest, by their numbers
    in the target's store of hidden states.
    """

    seq: int
    cached: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    busy: bool = False
    last_use: int = 0

    def common_prefix(self, tokens: list[int]) -> int:
        """How many tokens `tokens` and the cache begin with in common."""
        n = min(len(self.cached), len(tokens))
        for i in range(n):
            if self.cached[i] != tokens[i]:
                return i
        return n


@dataclass
class Sequence:
    """An answer in the making. The last of `tokens` is the anchor: emitted, in no cache yet."""

    request: Request
    slot: Slot
    sampler: Sampler
    stats: Stats
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def in_prompt(self) -> bool:
        """Whether rows of the prompt are still to be decoded."""
        return not self.tokens

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def remaining(self) -> int | None:
        """Tokens that may still be emitted; None: no limit."""
        limit = self.request.max_tokens
        return None if limit is None else limit - len(self.tokens)

    def emit(self, token: int, *, ends_text: bool) -> bool:
        """Append a token of the answer; True when the answer ends with it."""
        self.tokens.append(token)
        if ends_text or self.request.on_token(token):
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return self.finish_reason is not None
