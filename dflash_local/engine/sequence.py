"""The state of one answer, in token ids. It knows nothing about text."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dflash_local.copies.copier import Copier
from dflash_local.draft.draft import Candidates
from dflash_local.draft.shape import Shape
from dflash_local.engine.request import Request
from dflash_local.engine.slots import Slot
from dflash_local.pays.policy import Policy
from dflash_local.sampling.params import TokenLogprob
from dflash_local.sampling.sampler import Sampler, not_finite
from dflash_local.stats import Stats
from dflash_local.target.target import Target

FinishReason = Literal["stop", "length", "cancelled"]
WholeRow: TypeAlias = Callable[[], NDArray[np.float32]]
"""Fetches all logits of a row, float32 [n_vocab]."""


@dataclass
class Sequence:
    """An answer in progress. The last of `tokens` is the anchor: emitted, but in no cache yet."""

    request: Request
    slot: Slot
    sampler: Sampler
    stats: Stats
    fixed_shape: Shape
    """The shape of its drafts, unless a policy chooses it."""
    policy: Policy | None = None
    """Only for a request that leaves its width to the controller."""
    copier: Copier | None = None
    """Only for a request that may draft what its text has already."""
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    """For each token, whether it is an accepted draft."""
    from_copy: list[bool] = field(default_factory=list)
    """For each token, whether it is an accepted draft that only the text itself proposed."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """What went wrong with this sequence."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    has_slot: bool = True
    """False after its end and while it is suspended. Another sequence may then have `slot`."""
    behind: bool = False
    """The drafter has failed and lost the text, so the rest of the answer is decoded plainly."""
    turn: int = 0
    """The engine's step that last decoded rows of its prompt."""
    begun_at: float = 0.0

    @property
    def shape(self) -> Shape:
        """The shape of its next draft."""
        return self.fixed_shape if self.policy is None else self.policy.shape

    def rate(self, candidates: Candidates) -> Candidates:
        """Candidates with the log-probabilities that its policy, if any, has learnt for them."""
        return candidates if self.policy is None else self.policy.rate(candidates)

    @property
    def wants_features(self) -> bool:
        """Whether it may still draft, so that the drafter needs the target's hidden states."""
        if self.behind:
            return False
        if self.policy is not None:
            return not self.policy.off
        return self.request.drafts

    @property
    def takes_best(self) -> bool:
        """Whether it always takes the likeliest token and needs nothing else of the logits."""
        return self.sampler.takes_best and self.request.sampling.logprobs is None

    @property
    def text(self) -> list[int]:
        """The prompt and what has been emitted."""
        return self.request.prompt + self.tokens if self.tokens else self.request.prompt

    @property
    def n_left(self) -> int:
        """Rows to decode before its next round: the rest of the prompt and, if the caches have
        lost some of the answer, the answer up to the anchor."""
        return len(self.request.prompt) + max(len(self.tokens) - 1, 0) - len(self.slot.cached)

    @property
    def in_prompt(self) -> bool:
        return self.n_left > 0

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def remaining(self) -> int | None:
        """How many more tokens may be emitted; None: no limit."""
        limit = self.request.max_tokens
        return None if limit is None else limit - len(self.tokens)

    def draw(self, target: Target, row: int, output_row: int) -> int:
        """Draw the target's token after `row` of its last batch, the `output_row`-th with logits.

        Fetches only those logits that the sampler needs.
        """
        sampler, whole = self.sampler, partial(target.logits, row)
        wants_logprobs = self.request.sampling.logprobs is not None
        if sampler.begins_with_best:
            # Also beside log-probabilities: a GPU chooses among equal logits in a way of its own.
            token = sampler.sample_best(self._likeliest(target, output_row, whole), whole)
            if wants_logprobs:
                self.logprobs.append(self._logprobs(target, output_row, token, whole))
            return token
        if sampler.adds_up and not wants_logprobs:
            temperature = float(self.request.sampling.temperature)
            sums = target.chunk_sums(output_row, temperature)
            if sums is not None:
                return sampler.sample_from_sums(*sums, partial(target.chunk, output_row), whole)
        n_candidates = sampler.n_candidates
        if n_candidates is not None and sampler.takes_log_sum:
            # On the host, adding up the row costs as much as drawing from it.
            n_candidates = n_candidates if target.searches(output_row, n_candidates) else None
        if n_candidates is None:
            logits = whole()
            token = sampler.sample(logits)
            if wants_logprobs:
                self.logprobs.append(sampler.logprobs(logits, token))
            return token
        ids, logits = target.candidates(output_row, n_candidates)
        takes_sum = wants_logprobs or sampler.takes_log_sum
        log_sum = target.log_sum(output_row) if takes_sum else math.nan
        token = sampler.sample_from(ids, logits, whole, log_sum)
        if wants_logprobs:
            self.logprobs.append(sampler.logprobs_from(ids, logits, log_sum, token, whole))
        return token

    def _likeliest(self, target: Target, output_row: int, whole: WholeRow) -> int:
        if not self.tokens and np.isnan(whole()).any():
            # A GPU passes over single NaNs, which damaged weights put into each row. Looking at
            # all of a row takes longer than a small model's step, so at the first one only.
            raise not_finite()
        best = target.best()[output_row]
        if best < 0:
            raise not_finite()
        return best

    def _logprobs(
        self, target: Target, output_row: int, token: int, whole: WholeRow
    ) -> TokenLogprob:
        n = self.sampler.n_candidates
        if n is None:
            return self.sampler.logprobs(whole(), token)
        ids, logits = target.candidates(output_row, n)
        return self.sampler.logprobs_from(ids, logits, target.log_sum(output_row), token, whole)

    def upcoming(self, n: int) -> list[int]:
        """Its next n tokens, where they are known before the target is asked; else none."""
        return []

    def emit(self, token: int, *, ends_text: bool) -> bool:
        """Append a token to the answer. True if the answer ends with it."""
        self.tokens.append(token)
        self.from_draft.append(False)  # set when its round is over
        self.from_copy.append(False)
        if ends_text or self.request.on_token(token):
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error = error
        self.finish_reason = "cancelled"
