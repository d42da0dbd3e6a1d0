"""The state of one answer, in token ids. It knows nothing about text."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from dflash_local.controller.controller import Policy
from dflash_local.copies.copier import Copier
from dflash_local.draft.draft import Candidates
from dflash_local.draft.shape import Shape
from dflash_local.draft.tree import Chances
from dflash_local.engine.request import Request
from dflash_local.engine.slots import Slot, Slots
from dflash_local.sampling.params import TokenLogprob
from dflash_local.sampling.sampler import Sampler
from dflash_local.stats import Stats
from dflash_local.target_model.images import Embeddings
from dflash_local.target_model.target import Target

_LEAST_SHIFTED = 16
"""A shift leaves out this part of the context at least: all behind it is decoded again."""

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(eq=False)
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
    """Only for a request that may draft copies of its text."""
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    """For each token, whether it is an accepted draft."""
    from_copy: list[bool] = field(default_factory=list)
    """For each token, whether it is an accepted draft that only the text itself proposed."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens after the first, if they were asked for."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """The error of this sequence."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    has_slot: bool = True
    """False after its end and while it is suspended. Another sequence may then have `slot`."""
    drafter_lost_text: bool = False
    """The drafter has failed and lost the text, so the rest of the answer is decoded plainly."""
    n_kept: int = 0
    n_left_out: int = 0
    """So many tokens of the text are left out, behind the first `n_kept`: see `shift`."""
    last_prefill_step: int = 0
    """The engine's step that last decoded rows of its prompt."""
    begun_at: float = 0.0
    seen: dict[int, Future[Embeddings]] = field(default_factory=dict)
    """The image that comes next in its prompt, by its place, once it has been begun."""

    @property
    def shape(self) -> Shape:
        return self.fixed_shape if self.policy is None else self.policy.shape

    @property
    def most_nodes(self) -> int:
        """The most nodes that a round may verify for it, copies apart."""
        width = self.request.draft_width
        return self.shape.n_nodes if width == "auto" else max(width - 1, 0)

    def rate(self, candidates: Candidates) -> Chances | None:
        """The chances of candidates, where its policy, if any, grows trees by them."""
        return None if self.policy is None else self.policy.rate(candidates)

    @property
    def wants_features(self) -> bool:
        """Whether it may still draft, so that the drafter needs the target's features."""
        if self.drafter_lost_text:
            return False
        if self.policy is not None:
            return not self.policy.off
        return self.request.drafts

    def without_drafter(self, slots: Slots) -> bool:
        """Whether the drafter has failed, and is put aside or has lost this text."""
        return self.drafter_lost_text or slots.drafter_suspended

    @property
    def draws_natively(self) -> bool:
        """Whether its tokens are drawn without asking a grammar or reporting log-probabilities, so
        that several can be drawn in one call."""
        return not self.sampler.is_bound and self.request.sampling.logprobs is None

    @property
    def text(self) -> list[int]:
        """The prompt and the emitted tokens, without those that were left out."""
        text = self.request.prompt + self.tokens if self.tokens else self.request.prompt
        if self.n_left_out:
            return text[: self.n_kept] + text[self.n_kept + self.n_left_out :]
        return text

    def shift(self, n_ctx: int) -> bool:
        """Leave out a part of the text, if it has filled the context and its request says so.

        As llama-server has it, the first `n_keep` tokens stay (-1: the prompt), and behind them
        `n_discard` are left out (0: half of the rest). Fewer are kept and more left out if the next
        shift would soon follow otherwise. llama.cpp moves the keys and values after them, which
        have seen the tokens left out; here these are decoded again.
        """
        n_keep = self.request.n_keep
        if n_keep is None or len(self.text) <= n_ctx:
            return False
        n_keep = len(self.request.prompt) if n_keep < 0 else n_keep
        least = -(-n_ctx // _LEAST_SHIFTED)
        self.n_kept = min(n_keep, n_ctx - 2 * least)
        rest = n_ctx - self.n_kept
        self.n_left_out += min(max(self.request.n_discard or rest // 2, least), rest - 1)
        self.stats.shifts += 1
        return True

    @property
    def n_left(self) -> int:
        """Rows to decode before its next round: the rest of the prompt and, if the caches have
        lost some of the answer, the answer up to the anchor."""
        n = len(self.request.prompt) + max(len(self.tokens) - 1, 0)
        return n - self.n_left_out - len(self.slot.cached)

    @property
    def n_cells_left(self) -> int:
        """Cells that these rows take."""
        begin, images = len(self.slot.cached), self.request.images
        return self.n_left + sum(images[place].n_more for place in images if place >= begin)

    @property
    def at_image(self) -> bool:
        """Whether an image comes next in its prompt."""
        return len(self.slot.cached) in self.request.images

    @property
    def in_prompt(self) -> bool:
        return self.n_left > 0

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def remaining(self) -> int | None:
        """The number of tokens that may still be emitted; None: no limit."""
        limit = self.request.max_tokens
        return None if limit is None else limit - len(self.tokens)

    def draw(self, target: Target, output_row: int) -> int:
        """Draw the target's token from an output row of its last pass."""
        token = self.sampler.draw(target, output_row)
        if self.request.sampling.logprobs is not None:
            self.logprobs.append(self._logprobs(target, output_row, token))
        return token

    @property
    def reports_prompt(self) -> bool:
        """Whether the rows of its prompt that come next give log-probabilities."""
        return self.request.prompt_logprobs is not None and not self.tokens

    def report_prompt(self, target: Target, begin: int, n_rows: int, output_row: int) -> None:
        """Take the log-probabilities from output rows of the last pass: those of the tokens after
        its rows of the prompt, which are at `begin`."""
        prompt, n = self.request.prompt, self.request.prompt_logprobs
        del self.prompt_logprobs[begin:]  # if it was suspended in its prompt
        for i, token in enumerate(prompt[begin + 1 : begin + 1 + n_rows]):
            row = target.output_logits(output_row + i)
            self.prompt_logprobs.append(self.sampler.logprobs(row, token, n))

    def _logprobs(self, target: Target, output_row: int, token: int) -> TokenLogprob:
        n, whole = self.sampler.n_candidates, partial(target.output_logits, output_row)
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
        self.from_draft.append(False)  # see `mark_drafted`
        self.from_copy.append(False)
        ends = ends_text or token in self.request.sampling.stop_token_ids
        if ends or self.request.on_token(token):
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def mark_drafted(self, copied: list[bool]) -> None:
        """The tokens before the last one were accepted drafts: copies, or a drafter's."""
        n = len(copied) + 1
        self.from_draft[-n:-1] = [True] * len(copied)
        self.from_copy[-n:-1] = copied

    @contextmanager
    def isolated_errors(self, slots: Slots) -> Iterator[None]:
        """An exception of its sampler or its `on_token`, or rows of its own that cannot be taken
        back, end this sequence alone and empty its slot."""
        try:
            yield
        except Exception as error:
            self.error = error
            self.finish_reason = "cancelled"
            slots.forget(self.slot)
