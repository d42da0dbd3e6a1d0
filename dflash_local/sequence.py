"""State of one answer, and of the slot whose caches it lives in. Token ids only, no text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dflash_local.constraint import Constraint
from dflash_local.controller import Policy
from dflash_local.draft_shape import DraftShape
from dflash_local.errors import ContextFullError, InputError
from dflash_local.sampling import Sampler, SamplingParams, TokenLogprob
from dflash_local.stats import Stats

FinishReason = Literal["stop", "length", "cancelled"]


def _never(_token: int) -> bool:
    return False


@dataclass(frozen=True)
class Request:
    """What to generate.

    `draft_width` are target rows per verify pass with the anchor; 0 (and 1) is plain decoding, and
    "auto" is what pays best, round by round. `draft_shape` is that of its drafts, where target and
    drafter can do more than chains. Without `cache_prompt` nothing of the prompt is taken
    from the caches. `on_token` hears every token but an end of text, in order; True ends generation
    with it. `constraint` is the one that `sampling` asks for, at its beginning and for this request
    alone; where there is none yet, it is made when the request begins.
    """

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    draft_width: int | Literal["auto"] = 0
    on_token: Callable[[int], bool] = _never
    cache_prompt: bool = True
    constraint: Constraint | None = None
    draft_shape: DraftShape = "chain"

    @property
    def drafts(self) -> bool:
        return self.draft_width == "auto" or self.draft_width > 1

    def check(self, n_vocab: int, n_ctx: int, max_width: int) -> None:
        """Raises InputError, ContextFullError for what cannot be begun.

        `max_width` is the widest verify pass; 0 where there is no drafter.
        """
        if not self.prompt:
            raise InputError("the prompt is empty; give at least one token")
        for token in self.prompt:
            if not 0 <= token < n_vocab:
                raise InputError(f"token id {token} of the prompt is not in 0 to {n_vocab - 1}")
        if len(self.prompt) >= n_ctx:
            raise ContextFullError(
                f"the prompt has {len(self.prompt)} tokens, the context holds {n_ctx} with at "
                "least one for the answer; shorten the prompt or load with a larger n_ctx (--ctx)"
            )
        if self.max_tokens is not None and not _is_count(self.max_tokens, 1):
            raise InputError(
                f"max_tokens is {self.max_tokens!r}; expected a whole number, 1 or more"
            )
        width = self.draft_width
        if width == "auto":
            return
        if not _is_count(width, 0):
            raise InputError(
                f'draft_width is {width!r}; expected a whole number, 0 or more, or "auto"'
            )
        if self.drafts and not max_width:
            raise InputError(
                f"draft_width is {width}, but there is no drafter; "
                "load one with draft=, or set draft_width to 0"
            )
        if width > max(max_width, 1):
            what = "this drafter's block" if self.draft_shape == "chain" else "a draft tree"
            raise InputError(f"draft_width is {width}; {what} allows at most {max_width}")


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
    resigned: bool = False
    """Drafting was given up here for good, so that the drafter has fallen behind the target."""

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
    policy: Policy | None = None
    """Of a request that leaves its width to the controller."""
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    """Of each token, whether it is an accepted draft; the others the target wrote itself."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """What went wrong with this sequence alone."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    has_slot: bool = True
    """False at its end, and while it is suspended: `slot` is then another's."""
    turn: int = 0
    """The engine's step in which its prompt was last served."""
    begun_at: float = 0.0

    @property
    def keeps_features(self) -> bool:
        """Whether it may still draft, so that the drafter will want what the target sees."""
        if self.policy is not None:
            return not self.policy.off
        return self.request.drafts

    @property
    def takes_best(self) -> bool:
        """Whether its tokens are the likeliest ones, and nothing else is asked of the logits."""
        return self.sampler.takes_best and self.request.sampling.logprobs is None

    @property
    def text(self) -> list[int]:
        """The prompt and what has been emitted."""
        return self.request.prompt + self.tokens if self.tokens else self.request.prompt

    @property
    def n_left(self) -> int:
        """Rows to decode before its next round: of the prompt, and where the caches have lost it,
        of the answer up to the anchor."""
        return len(self.request.prompt) + max(len(self.tokens) - 1, 0) - len(self.slot.cached)

    @property
    def in_prompt(self) -> bool:
        return self.n_left > 0

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
        self.from_draft.append(False)  # until its round is over
        if ends_text or self.request.on_token(token):
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error = error
        self.finish_reason = "cancelled"


def _is_count(value: object, least: int) -> bool:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and value >= least  # type: ignore[operator]
