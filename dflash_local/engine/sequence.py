"""State of one answer, in token ids. It knows nothing of text."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

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


@dataclass
class Sequence:
    """An answer in progress. The last of `tokens` is the anchor: emitted, in no cache yet."""

    request: Request
    slot: Slot
    sampler: Sampler
    stats: Stats
    fixed_shape: Shape
    """Of its drafts, unless a policy chooses it."""
    policy: Policy | None = None
    """Of a request that leaves its width to the controller."""
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    """For each token whether it is an accepted draft; the others the target wrote itself."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """What went wrong with this sequence alone."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    has_slot: bool = True
    """False at its end and while it is suspended: `slot` then belongs to others."""
    behind: bool = False
    """The drafter has failed and lost the text, so the rest of the answer is decoded plainly."""
    turn: int = 0
    """The engine's step in which its prompt had rows last."""
    begun_at: float = 0.0

    @property
    def shape(self) -> Shape:
        """Of its next draft."""
        return self.fixed_shape if self.policy is None else self.policy.shape

    def rate(self, candidates: Candidates) -> Candidates:
        """What the candidates of a draft are worth, as far as a policy has learnt it."""
        return candidates if self.policy is None else self.policy.rate(candidates)

    @property
    def wants_features(self) -> bool:
        """Whether it may still draft, so that the drafter will need what the target sees."""
        if self.behind:
            return False
        if self.policy is not None:
            return not self.policy.off
        return self.request.drafts

    @property
    def takes_best(self) -> bool:
        """Whether its tokens are the likeliest ones, and nothing else of the logits is needed."""
        return self.sampler.takes_best and self.request.sampling.logprobs is None

    @property
    def text(self) -> list[int]:
        """The prompt and what has been emitted."""
        return self.request.prompt + self.tokens if self.tokens else self.request.prompt

    @property
    def n_left(self) -> int:
        """Rows to decode before its next round: of the prompt and, if the caches have lost some of
        it, of the answer up to the anchor."""
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

    def draw(self, target: Target, row: int, output_row: int) -> int:
        """The target's token after a row of its last batch, the `output_row`-th with logits.

        Fetches no more of the logits than the sampler needs.
        """
        sampler = self.sampler
        whole = partial(target.logits, row)
        if self.request.sampling.logprobs is not None:
            logits = whole()
            token = sampler.sample(logits)
            self.logprobs.append(sampler.logprobs(logits, token))
            return token
        if sampler.begins_with_best:
            best = target.best()[output_row]
            if best < 0:
                raise not_finite()
            return sampler.sample_best(best, whole)
        n_candidates = sampler.n_candidates
        if n_candidates is not None:
            return sampler.sample_from(*target.candidates(output_row, n_candidates), whole)
        return sampler.sample(whole())

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
