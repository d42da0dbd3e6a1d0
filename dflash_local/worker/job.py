"""Work for the model's thread: a request from its submission to its result, with its text."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_local.engine.request import Request
from dflash_local.engine.scheduler import Waiting, cells_for
from dflash_local.engine.sequence import Sequence
from dflash_local.result import Chunk, Piece, PromptProgress, Result
from dflash_local.stats import Stats
from dflash_local.worker.text import TextStream


class Job:
    """Work that a caller may give up at any moment.

    `sink` is called on the model's thread with every item, and with the job itself at its end.
    `ticket` is the queue's record of it. `error` is its fault; it is set before the job is passed
    to the sink.
    """

    def __init__(self, sink: Callable[[Any], None]) -> None:
        self.ticket = Waiting(exclusive=True)
        self.waits_since = time.monotonic()
        self.cancelled = threading.Event()
        self.error: BaseException | None = None
        self._sink = sink
        self._done = threading.Event()

    @property
    def given_up(self) -> bool:
        """Whether its caller no longer waits for it."""
        return self.cancelled.is_set()

    def is_done_waiting(self) -> bool:
        """Whether it needs no slot any more."""
        return self.given_up

    def put(self, item: Any) -> None:
        """Hand an item to the caller. If the sink raises, the job is cancelled: an asynchronous
        reader's sink does so once its event loop is closed."""
        try:
            self._sink(item)
        except Exception:
            self.cancelled.set()

    def cancel(self) -> None:
        """Ask the job to end. It does within one round."""
        self.cancelled.set()

    def wait(self) -> None:
        """Wait until the job has ended. Not for the model's own thread."""
        self._done.wait()

    def finish(self, error: BaseException | None = None) -> None:
        """End the job, and tell its caller."""
        self.error = error or self.error
        self._done.set()
        self.put(self)


class Task(Job):
    """Work that needs the engine without any running sequence. Its one item is its result."""

    def __init__(self, work: Callable[[], Any], sink: Callable[[Any], None]) -> None:
        super().__init__(sink)
        self.work = work


@dataclass(frozen=True)
class TextRequest:
    """A request, with the facts that the engine need not know.

    The request's `on_token` is `text.push`. `cancel` is the caller's own event. Times are in
    seconds: `queue_timeout` to wait for a slot, `deadline_s` from the first token to the last.
    `on_end` is called with the stats at the end. `tells_prompt`: the first chunks tell the prompt's
    progress.
    """

    request: Request
    text: TextStream
    cancel: threading.Event | None = None
    queue_timeout: float | None = None
    deadline_s: float | None = None
    on_end: Callable[[Stats], None] | None = None
    tells_prompt: bool = False


class Generation(Job):
    """The job for a request. Except for `cancel` and `wait`, only the model's thread may use it."""

    def __init__(self, wanted: TextRequest, sink: Callable[[Any], None], n_ctx: int) -> None:
        super().__init__(sink)
        self.wanted = wanted
        self.sequence: Sequence | None = None
        self.begun_at: float | None = None
        timeout = wanted.queue_timeout
        until = None if timeout is None else self.waits_since + timeout
        self.ticket = Waiting(self.cells(n_ctx), until)
        self._first_token_at: float | None = None
        self._pieces: list[Piece] = []
        self._n_shown = 0  # characters of text handed out
        self._token = 0  # the one that completes the next of them
        self._n = 0  # tokens handed out
        self._n_read = -1  # tokens of the prompt that were told

    @property
    def given_up(self) -> bool:
        cancel = self.wanted.cancel
        try:
            return self.cancelled.is_set() or (cancel is not None and cancel.is_set())
        except Exception as error:  # the caller's object may end its own request, no other
            self.error = error
            self.cancelled.set()
            return True

    def is_done_waiting(self) -> bool:
        """Whether its caller has given it up, or the deadline of a suspended answer has passed."""
        if self.sequence is None:
            return self.given_up
        self.check_limits()
        return self.is_over

    @property
    def running(self) -> Sequence:
        """The sequence of a job that has begun."""
        assert self.sequence is not None
        return self.sequence

    @property
    def is_over(self) -> bool:
        return self.running.finish_reason is not None

    @property
    def stats(self) -> Stats:
        """The cost of the request so far."""
        return self.sequence.stats if self.sequence else Stats()

    def cells(self, n_ctx: int) -> int:
        """Cells to promise the request."""
        request = self.wanted.request
        s = self.sequence
        n_emitted = len(s.tokens) - s.n_left_out if s else 0
        return cells_for(request.n_cells, n_emitted, request.max_tokens, n_ctx)

    def begin(self, sequence: Sequence) -> None:
        """The request got a slot, for the first time or again."""
        now = time.monotonic()
        self.sequence = sequence
        sequence.stats.queue_s += now - self.waits_since
        if self.begun_at is None:
            self.begun_at = now
        self._tell_prompt()

    def wait_again(self, n_ctx: int) -> None:
        """The request gave back its slot and waits for another one, however long that takes."""
        self.waits_since = time.monotonic()
        self.ticket = Waiting(self.cells(n_ctx))

    def check_limits(self) -> None:
        """End the sequence if its caller has given it up, or its deadline has passed."""
        limit, since = self.wanted.deadline_s, self._first_token_at
        if self.given_up:
            self.running.finish_reason = "cancelled"
        elif limit is not None and since is not None and time.monotonic() - since >= limit:
            self.running.finish_reason = "length"

    def deliver(self) -> None:
        """Hand out the new tokens."""
        self._tell_prompt()
        if self._n < len(self.running.tokens):
            if self._first_token_at is None:
                self._first_token_at = time.monotonic()
            text = self.wanted.text.take()
            self._put(text, self._next_pieces(text))

    def conclude(self) -> None:
        """Hand out the rest and the result of a request that ended without an error.

        If it was given up before it began, the result is empty.
        """
        sequence = self.sequence
        if sequence is None:
            seed = self.wanted.request.sampling.seed
            waited = Stats(queue_s=time.monotonic() - self.waits_since)
            self.put(Chunk("", [], result=Result("", [], "cancelled", waited, seed or 0)))
            return
        if self.wanted.on_end:
            self.wanted.on_end(sequence.stats)
        self._tell_prompt()
        rest = self.wanted.text.take() + self.wanted.text.finish()
        last = self._next_pieces(rest)
        self._put(rest, last, result=self._result(sequence))

    def _tell_prompt(self) -> None:
        """Hand out the progress of the prompt, where that is asked for and has grown."""
        sequence, stats = self.running, self.running.stats
        n = sequence.request.n_cells
        if sequence.tokens:
            n_read = n
        else:  # a slot that was given back may have another text
            n_read = n - max(sequence.n_cells_left, 0) if sequence.has_slot else 0
        if self.wanted.tells_prompt and self._n_read < n_read:
            self._n_read = n_read
            told = PromptProgress(n, stats.cached_tokens, n_read, stats.prompt_s)
            self.put(Chunk("", [], prompt=told))

    def _result(self, sequence: Sequence) -> Result:
        return Result(
            text="".join(piece.text for piece in self._pieces),
            tokens=sequence.tokens,
            finish_reason=sequence.finish_reason or "cancelled",
            stats=sequence.stats,
            seed=sequence.sampler.seed,
            logprobs=sequence.logprobs,
            from_draft=sequence.from_draft,
            from_copy=sequence.from_copy,
            pieces=self._pieces,
            prompt_logprobs=sequence.prompt_logprobs,
            stopped_by=self.wanted.text.stopped_by,
        )

    def _next_pieces(self, text: str) -> list[Piece]:
        """The parts of `text`, the next to be handed out, by whether they were drafted."""
        ends, sequence = self.wanted.text.ends, self.running
        found: list[Piece] = []
        while text:
            while self._token + 1 < len(ends) and ends[self._token] <= self._n_shown:
                self._token += 1
            is_last = self._token + 1 >= len(ends)
            n = len(text) if is_last else min(len(text), ends[self._token] - self._n_shown)
            drafted, copied = sequence.from_draft[self._token], sequence.from_copy[self._token]
            _add_piece(found, Piece(text[:n], drafted, copied))
            self._n_shown += n
            text = text[n:]
        for piece in found:
            _add_piece(self._pieces, piece)
        return found

    def _put(self, text: str, pieces: list[Piece], result: Result | None = None) -> None:
        sequence, n = self.running, self._n
        self._n = len(sequence.tokens)
        drafting = sequence.policy.reason if sequence.policy else None
        ends = self.wanted.text.ends  # without the last token's, if that ends the text
        self.put(
            Chunk(
                text,
                sequence.tokens[n:],
                sequence.logprobs[n:],
                result,
                sequence.from_draft[n:],
                drafting,
                sequence.from_copy[n:],
                pieces,
                starts=[ends[i - 1] if i else 0 for i in range(n, self._n)],
            )
        )


def _add_piece(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or make the last one longer if both are of one kind."""
    if pieces and pieces[-1][1:] == piece[1:]:
        pieces[-1] = piece._replace(text=pieces[-1].text + piece.text)
    else:
        pieces.append(piece)
