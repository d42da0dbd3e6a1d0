"""The PyTorch drafter of `dflash_local_tune`, as an oracle: sequences, and whole log-probabilities.

Every weight is dequantised on load.
"""

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_local_tune.drafter import Context
from dflash_local_tune.weights import read_torch_drafter


class Reference:
    """The drafter at `drafter_path`; embeddings and output head are the target's where it has none.

    Computes in `dtype`. `cache_dtype` is the type to which keys and values are rounded, those of
    the block included: float16 is what a cache of llama.cpp holds by default.
    """

    def __init__(
        self,
        drafter_path: str | Path,
        target_path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._drafter = read_torch_drafter(
            Path(drafter_path), Path(target_path), dtype=dtype, cache_dtype=cache_dtype
        )
        self._dtype = dtype
        self._contexts: dict[int, Context] = {}
        self.block_size = self._drafter.block_size
        self.feature_size = self._drafter.feature_size
        self.n_layer = self._drafter.n_layer

    @property
    def draft_window(self) -> int:
        """Rows, the last injected ones, that a block attends to; 0: all."""
        return self._drafter.draft_window

    @draft_window.setter
    def draft_window(self, n: int) -> None:
        self._drafter.draft_window = n

    @property
    def sliding_window(self) -> int:
        """Tokens that layers with a window see."""
        return self._drafter.sliding_window

    @sliding_window.setter
    def sliding_window(self, n: int) -> None:
        self._drafter.sliding_window = n

    def length(self, seq: int) -> int:
        return len(self._contexts.get(seq, Context()))

    def truncate(self, seq: int, length: int) -> None:
        self.copy(seq, seq, length)

    def copy(self, source: int, destination: int, length: int) -> None:
        """The first `length` rows of `source` become those of `destination`."""
        context = self._contexts.get(source, Context())
        self._contexts[destination] = Context(
            [rows[:, :length] for rows in context.keys],
            [rows[:, :length] for rows in context.values],
        )
        if length == 0:
            self.clear(destination)

    def clear(self, seq: int) -> None:
        self._contexts.pop(seq, None)

    def inject(self, seq: int, features: NDArray[np.float32]) -> None:
        """Append rows of context features [rows, n_taps * n_embd] at the next positions."""
        if len(features) == 0:
            return
        rows = torch.tensor(np.asarray(features)).to(self._dtype)
        new = self._drafter.inject(rows, self.length(seq))
        old = self._contexts.get(seq)
        if old is not None:
            new.keys = [torch.cat(pair, 1) for pair in zip(old.keys, new.keys, strict=True)]
            new.values = [torch.cat(pair, 1) for pair in zip(old.values, new.values, strict=True)]
        self._contexts[seq] = new

    def draft(self, seq: int, anchor: int) -> Tensor:
        """Log-probabilities [drafted positions, n_vocab] of the tokens that follow `anchor`."""
        drafted = self.scaled(self.logits(seq, anchor))[self._drafter.first_draft :]
        return torch.log_softmax(drafted, dim=-1)

    def logits(self, seq: int, anchor: int) -> Tensor:
        """Of the whole block, [block_size, n_vocab], neither scaled nor capped."""
        return self._drafter.logits(self._hidden(seq, anchor))

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits scaled and capped, as the keys say."""
        return self._drafter.scaled(logits)

    def draft_after(self, seq: int, anchor: int, position: int, before: int) -> Tensor:
        """DSpark: log-probabilities [n_vocab] of a drafted position, given the token before it."""
        logits = self.logits(seq, anchor)[self._drafter.first_draft + position]
        bias = self._drafter.markov(torch.tensor(before))
        return torch.log_softmax(self.scaled(logits + bias), dim=-1)

    def confidence(self, seq: int, anchor: int, position: int, before: int) -> float:
        """DSpark: the chance that the target accepts a drafted position after this token."""
        hidden = self._hidden(seq, anchor)[self._drafter.first_draft + position]
        found = self._drafter.confidence(hidden, torch.tensor(before))
        assert found is not None, "the file has a confidence head"
        return float(torch.sigmoid(found))

    def draft_steps(self, seq: int, anchor: int, tokens: list[int]) -> Tensor:
        """DFlash 2: log-probabilities [len(tokens), n_vocab] of the positions after these tokens,
        minus infinity for all but the selector's candidates."""
        hidden = self._hidden(seq, anchor)[1:][: len(tokens)]
        return self._candidate_scores(self._drafter.logits(hidden), hidden, torch.tensor(tokens))

    def _candidate_scores(self, logits: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [n, n_vocab] of rows of logits after these tokens."""
        logits = self.scaled(logits)
        ids, scores = self._drafter.select(hidden, logits, tokens)
        rows = torch.full_like(logits, -math.inf)
        return rows.scatter(1, ids, torch.log_softmax(scores, dim=-1))

    def _hidden(self, seq: int, anchor: int) -> Tensor:
        """The output head's input: [block_size, n_embd]."""
        context = self._contexts.get(seq, Context())
        start = torch.tensor([len(context)])
        return self._drafter.hidden(context, torch.tensor([anchor]), start)[0]
