"""Answers of the target to learn from: their tokens, features and the target's own distributions.

The engine drafts them as it drafts for users. The drafter's features pass through `TapReader`, so
nothing is computed twice, and nothing but the latest answers is kept.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_local.draft.drafter import Drafter, DraftRequest, WrappedDrafter
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.engine.sequence import Sequence as Running
from dflash_local.errors import BackendError
from dflash_local.sampling.chances import chances_of
from dflash_local.sampling.params import SamplingParams
from dflash_local.target_model.taps import Features, StoredFeatures
from dflash_local.target_model.target import Target

N_LABELS = 16
"""The likeliest tokens that are kept for each position. Together they nearly always have all of the
probability."""
_MOST_LOOKED_AT = 64
"""Of a larger top_k: by then it cuts next to nothing off, and each one costs time."""
LEAST_ANSWER = 8
"""Tokens; shorter answers teach next to nothing."""

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Answer:
    """An answer and its sources.

    `tokens` are prompt and answer, `n_prompt` of them the prompt. `features`, [n, n_features], are
    those of all tokens but the last one, in the trainer's type. The i-th token of the answer was
    drawn from `label_ids[i]`, int64 [N_LABELS], by the chances `label_probs[i]`, which add up to 1.
    `rounds`, int64, are the positions at which the engine's rounds had their anchors.
    """

    tokens: Tensor
    n_prompt: int
    features: Tensor
    label_ids: Tensor
    label_probs: Tensor
    rounds: Tensor = _NONE

    @property
    def n_bytes(self) -> int:
        parts = self.tokens, self.features, self.label_ids, self.label_probs
        return sum(part.numel() * part.element_size() for part in parts)


def n_looked_at(sampling: SamplingParams, n_vocab: int) -> int:
    """The number of likeliest tokens that `drawing` takes."""
    top_k = 0 if sampling.greedy or sampling.top_k > _MOST_LOOKED_AT else sampling.top_k
    return min(n_vocab, max(N_LABELS, top_k))


def drawing(logprobs: Tensor, sampling: SamplingParams, n_vocab: int) -> Tensor:
    """The chances by which the sampler draws the likeliest of `n_vocab` tokens, given their
    log-probabilities [n, k], the largest first. A greedy answer's are the target's own, as likely
    tokens beside the likeliest teach, too."""
    if sampling.greedy:
        return logprobs.softmax(dim=-1)
    chances = chances_of(logprobs.double().numpy(), sampling, n_vocab)
    return torch.from_numpy(chances).to(logprobs.dtype)


def moved(value: Tensor, device: torch.device) -> Tensor:
    """On a device; from the host by a copy that does not wait for the work before it."""
    if device.type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


class Ring(deque[Answer]):
    """The latest answers, within `max_bytes`. A new one drops the oldest ones."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.n_bytes = 0

    def add(self, answer: Answer) -> None:
        """The newest stays even if it alone is larger than the ring."""
        self.append(answer)
        self.n_bytes += answer.n_bytes
        while self.n_bytes > self.max_bytes and len(self) > 1:
            self.n_bytes -= self.popleft().n_bytes

    def batch(self, n_new: int, most: int, rng: random.Random) -> list[Answer]:
        """At most `most` answers: the last `n_new`, as far as they are there, and some older
        ones."""
        n_new = min(n_new, most, len(self))
        n_old = len(self) - n_new
        old = rng.sample(range(n_old), min(n_old, most - n_new))
        return [self[i] for i in (*range(n_old, len(self)), *old)]


class TapReader(WrappedDrafter):
    """Keeps the features of each sequence's rows on their way to a drafter."""

    def __init__(self, inner: Drafter, target: Target, dtype: torch.dtype) -> None:
        super().__init__(inner)
        self.saves_rows = False  # features of restored rows are not known
        self._target = target
        self._dtype = dtype
        self._rows: dict[int, list[Tensor]] = {}
        self._rounds: dict[int, list[int]] = {}

    def features(self, seq: int) -> Tensor:
        """Those of all rows of a sequence, [n, n_features]."""
        rows = self._rows.get(seq)
        return torch.cat(rows) if rows else torch.empty(0, self._target.n_features)

    def rounds(self, seq: int) -> list[int]:
        """The positions of the anchors of a sequence's drafts: each follows the rows before it."""
        return self._rounds.get(seq, [])

    def inject(self, seq: int, features: Features) -> None:
        self._read([seq], [features])
        super().inject(seq, features)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        super().begin(requests)
        # After it: the device drafts while the rows are copied.
        self._read([request.seq for request in requests], [r.features for r in requests])
        for seq in (request.seq for request in requests):
            self._rounds.setdefault(seq, []).append(sum(map(len, self._rows[seq])))

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self._rows[seq] = [self.features(seq)[:length]] if length else []
        self._rounds[seq] = [each for each in self.rounds(seq) if each < length]

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self._rows[target] = [self.features(source)[:length]]
        self._rounds[target] = [each for each in self.rounds(source) if each < length]

    def close(self) -> None:
        """Leaves the drafter open."""
        self._rows.clear()
        self._rounds.clear()

    def _read(self, seqs: Sequence[int], features: Sequence[Features]) -> None:
        """One copy from the device for the rows of all sequences."""
        if all(isinstance(each, StoredFeatures) for each in features):
            numbers = [row for each in features for row in each.rows]  # type: ignore[union-attr]
            values: NDArray[np.float32] = self._target.stored(numbers)
        else:
            values = np.concatenate([np.asarray(each) for each in features])
        rows = torch.from_numpy(values).to(self._dtype)
        begin = 0
        for seq, each in zip(seqs, features, strict=True):
            self._rows.setdefault(seq, []).append(rows[begin : begin + len(each)])
            begin += len(each)


class Answerer:
    """Lets a target answer prompts, several at once, without an end.

    It has an engine of its own on the target and its drafter. While it runs, no other engine may
    use them; after `pause`, others may.
    """

    def __init__(
        self, target: Target, drafter: Drafter, n_seq: int, max_tokens: int, dtype: torch.dtype
    ) -> None:
        self._target = target
        self._reader = TapReader(drafter, target, dtype)
        self._engine = Engine(target, self._reader, n_seq)
        self._n_seq = n_seq
        self._max_tokens = max_tokens
        self._running: list[Running] = []

    def answers(self, prompts: Iterator[tuple[list[int], SamplingParams]]) -> Iterator[Answer]:
        """The answers as they end; they need not be in the order of the prompts. The next prompt
        is taken when a slot is free. Raises BackendError if drafting fails."""
        more = True
        while more or self._running:
            while more and len(self._running) < self._n_seq:
                asked = next(prompts, None)
                more = asked is not None
                if asked is not None:
                    self._running.append(self._begin(*asked))
            if self._running:
                self._engine.step(self._running)
            ended = [each for each in self._running if each.finish_reason is not None]
            self._running = [each for each in self._running if each.finish_reason is None]
            for sequence in ended:
                answer = self._end(sequence)
                if answer is not None:
                    yield answer

    def pause(self) -> None:
        """Give up the answers in progress, and empty the caches."""
        for sequence in self._running:
            self._engine.end(sequence)
        self._running = []
        self._engine.slots.forget_all()

    def _begin(self, prompt: list[int], sampling: SamplingParams) -> Running:
        return self._engine.begin(
            Request(
                prompt,
                replace(sampling, logprobs=n_looked_at(sampling, self._target.n_vocab)),
                self._max_tokens,
                self._engine.max_width,
                cache_prompt=False,
            )
        )

    def _end(self, sequence: Running) -> Answer | None:
        self._engine.end(sequence)
        if sequence.error is not None:
            raise sequence.error
        if self._engine.slots.failure is not None:
            raise BackendError(self._engine.slots.failure)
        tokens = sequence.text
        features = self._reader.features(sequence.slot.seq)
        if len(sequence.tokens) < LEAST_ANSWER:
            return None
        if len(features) < len(tokens) - 1:
            raise BackendError(
                f"{len(features)} hidden states of an answer with {len(tokens)} tokens"
            )
        tops = [found.top for found in sequence.logprobs]
        logprobs = torch.tensor([[logprob for _, logprob in top] for top in tops])
        probs = drawing(logprobs, sequence.request.sampling, self._target.n_vocab)[:, :N_LABELS]
        rounds = [each for each in self._reader.rounds(sequence.slot.seq) if each < len(tokens) - 1]
        return Answer(
            torch.tensor(tokens),
            len(sequence.request.prompt),
            features[: len(tokens) - 1].clone(),
            torch.tensor([[token for token, _ in top[:N_LABELS]] for top in tops]),
            probs / probs.sum(dim=-1, keepdim=True),
            torch.tensor(rounds, dtype=torch.int64),
        )
