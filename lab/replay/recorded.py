"""Recorded drafts of tiny-coder and the target's texts, for models whose own drafts mean
nothing.

There is an entry for every position of some passages of greedy answers: the log-probabilities of
the drafter's candidates for the tokens after it, and which of them the target wrote. An answer that
walks through a passage round by round finds the worth of chains and trees of any width there,
together with the confidence that the drafter had. `lab/record_drafts.py` makes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_local.errors import InputError

_FILE = Path(__file__).resolve().parent / "recorded.npz"
# A log-probability is kept as a byte of -log(0.001 - logprob): as fine for 0.999 as for 0.5.
_NUDGE, _LEAST, _MOST = 0.001, -3.2, 7.0


@dataclass(frozen=True)
class RecordedDrafts:
    """`logprobs`, float32 [passages, tokens, drafts, k], are best first. `ranks`, uint8 [passages,
    tokens, drafts], is the candidate that was written, k where it was none of them."""

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.uint8]

    @classmethod
    @cache
    def shipped(cls) -> RecordedDrafts:
        return cls.read(_FILE)

    @classmethod
    def read(cls, path: Path) -> RecordedDrafts:
        """Raises OSError, KeyError, ValueError."""
        with np.load(path) as arrays:
            codes = arrays["confidence"].astype(np.float32)
            confidence = _LEAST + codes * ((_MOST - _LEAST) / 255)
            logprobs = np.minimum(_NUDGE - np.exp(-confidence), 0.0)
            return cls(logprobs.astype(np.float32), arrays["ranks"])

    def write(self, path: Path) -> None:
        """Raises OSError."""
        confidence = -np.log(_NUDGE - np.minimum(self.logprobs, 0.0))
        codes = np.rint((confidence - _LEAST) * (255 / (_MOST - _LEAST)))
        codes = np.clip(codes, 0, 255).astype(np.uint8)
        np.savez_compressed(path, confidence=codes, ranks=self.ranks)

    @property
    def n_passages(self) -> int:
        return int(self.ranks.shape[0])

    @property
    def n_tokens(self) -> int:
        """Of a passage."""
        return int(self.ranks.shape[1])

    @property
    def n_drafts(self) -> int:
        """Of a block."""
        return int(self.ranks.shape[2])

    @cached_property
    def kept(self) -> NDArray[np.int64]:
        """[passages, tokens]: the number of the drafter's first choices written in a row."""
        return np.asarray(np.cumprod(self.ranks == 0, axis=2).sum(axis=2), np.int64)

    def lengths(self, passage: int, n_drafts: int) -> list[int]:
        """Tokens of the rounds in which chains of so many drafts go through a passage."""
        kept = np.minimum(self.kept[passage], n_drafts).tolist()
        found, at = [], 0
        while at < self.n_tokens:
            found.append(1 + kept[at])
            at += found[-1]
        return found

    def weights(self, length: float, n_whole: int | None = None) -> NDArray[np.float64]:
        """[passages]: how often to draw each, so that whole chains of `n_whole` drafts (None: of
        all) give rounds of `length` tokens, the target's own included.

        The longer the rounds of a passage, the more its weight is raised or lowered (exponential
        tilting: Siegmund 1976). All weights are equal where the length is that of the recording.
        Raises InputError for a length that is longer, or shorter, than that of any passage.
        """
        walks = self._walks(n_whole or self.n_drafts)
        n_rounds = np.array([len(walk) for walk in walks], np.float64)
        n_tokens = np.array([sum(walk) for walk in walks], np.float64)
        means = n_tokens / n_rounds
        if not means.min() <= length <= means.max():  # refuses NaN too
            raise InputError(
                f"a synthetic accepted length of {length}; expected {means.min():.2f} to "
                f"{means.max():.2f}, as the rounds of the passages recorded"
            )

        def tilted(power: float) -> NDArray[np.float64]:
            logs = power * means
            shares = np.exp(logs - logs.max())
            return np.asarray(shares / shares.sum())

        low, high = -50.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            shares = tilted(middle)
            longer = float(shares @ n_tokens) >= length * float(shares @ n_rounds)
            low, high = (low, middle) if longer else (middle, high)
        return tilted((low + high) / 2)

    def rates(self, length: float, n_drafts: int, n_whole: int | None = None) -> list[float]:
        """The chance of each draft of a chain, 1..n, to be accepted, with the `weights` for
        `length`: the input of llama-server's `--spec-synth-rates`. Raises InputError."""
        weights, walks = self.weights(length, n_whole), self._walks(n_drafts)
        places = np.arange(1, n_drafts + 1)
        kept = [(np.array(walk)[:, None] > places).sum(axis=0) for walk in walks]
        n_rounds = [len(walk) for walk in walks]
        rates: list[float] = (weights @ np.array(kept) / (weights @ np.array(n_rounds))).tolist()
        return rates

    def _walks(self, n_drafts: int) -> Sequence[list[int]]:
        return [self.lengths(passage, n_drafts) for passage in range(self.n_passages)]
