"""A request on its way: it waits, it is a sequence, it is a result. Here tokens become text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_local.job import Job
from dflash_local.result import Chunk, Result
from dflash_local.scheduler import Waiting, cells_for
from dflash_local.sequence import Request, Sequence
from dflash_local.stats import Stats
from dflash_local.text import TextStream


@dataclass(frozen=True)
class Order:
    """What a caller wants: a request, and what the engine does not know of.

    The request's `on_token` is the `text`'s. `cancel` is the caller's own event. Times are in
    seconds: `queue_timeout` to wait for a slot, `deadline_s` from the first token to the last.
    `tell` hears what the answer has cost, at its end.
    """

    request: Request
    text: TextStream
    cancel: threading.Event | None = None
    queue_timeout: float | None = None
    deadline_s: float | None = None
    tell: Callable[[Stats], None] | None = None


class Answer(Job):
    """The job that an order is. All but `cancel` and `wait` belong to the model's thread."""

    def __init__(self, order: Order, sink: Callable[[Any], None], n_ctx: int) -> None:
        super().__init__(sink)
        self.order = order
        self.sequence: Sequence | None = None
        self.waits_since = time.monotonic()
        self.begun_at: float | None = None
        timeout = order.queue_timeout
        until = None if timeout is None else self.waits_since + timeout
        self.ticket = Waiting(self.cells(n_ctx), until)
        self._first_token_at: float | None = None
        self._shown: list[str] = []
        self._n = 0  # tokens handed out

    @property
    def given_up(self) -> bool:
        cancel = self.order.cancel
        return self.cancelled.is_set() or (cancel is not None and cancel.is_set())

    @property
    def at_work(self) -> Sequence:
        """The sequence of an answer that has begun."""
        assert self.sequence is not None
        return self.sequence

    @property
    def is_over(self) -> bool:
        return self.at_work.finish_reason is not None

    def cells(self, n_ctx: int) -> int:
        """Cells to promise it."""
        request = self.order.request
        n_emitted = len(self.sequence.tokens) if self.sequence else 0
        return cells_for(len(request.prompt), n_emitted, request.max_tokens, n_ctx)

    def begin(self, sequence: Sequence) -> None:
        """It has a slot, now or again."""
        now = time.monotonic()
        self.sequence = sequence
        sequence.stats.queue_s += now - self.waits_since
        if self.begun_at is None:
            self.begun_at = now

    def step_aside(self, n_ctx: int) -> None:
        """It has given back its slot, and waits until it has one again, however long that takes."""
        self.waits_since = time.monotonic()
        self.ticket = Waiting(self.cells(n_ctx))

    def heed(self) -> None:
        """End the sequence if nobody wants it any more, or its time is over."""
        limit, since = self.order.deadline_s, self._first_token_at
        if self.given_up:
            self.at_work.finish_reason = "cancelled"
        elif limit is not None and since is not None and time.monotonic() - since >= limit:
            self.at_work.finish_reason = "length"

    def deliver(self) -> None:
        """Hand out what is new."""
        if self._n < len(self.at_work.tokens):
            if self._first_token_at is None:
                self._first_token_at = time.monotonic()
            self._put(self.order.text.take())

    @property
    def stats(self) -> Stats:
        """What it has cost so far."""
        return self.sequence.stats if self.sequence else Stats()

    def conclude(self) -> None:
        """It is over without an error: hand out the rest, and the result. One that was given up
        before its turn has an empty one."""
        sequence = self.sequence
        if sequence is None:
            seed = self.order.request.sampling.seed
            waited = Stats(queue_s=time.monotonic() - self.waits_since)
            self.put(Chunk("", [], result=Result("", [], "cancelled", waited, seed or 0)))
            return
        if self.order.tell:
            self.order.tell(sequence.stats)
        rest = self.order.text.take() + self.order.text.finish()
        result = Result(
            text="".join([*self._shown, rest]),
            tokens=sequence.tokens,
            finish_reason=sequence.finish_reason or "cancelled",
            stats=sequence.stats,
            seed=sequence.sampler.seed,
            logprobs=sequence.logprobs,
            from_draft=sequence.from_draft,
        )
        self._put(rest, result)

    def _put(self, text: str, result: Result | None = None) -> None:
        sequence, n = self.at_work, self._n
        self._shown.append(text)
        self._n = len(sequence.tokens)
        drafting = sequence.policy.reason if sequence.policy else None
        self.put(
            Chunk(
                text,
                sequence.tokens[n:],
                sequence.logprobs[n:],
                result,
                sequence.from_draft[n:],
                drafting,
            )
        )
