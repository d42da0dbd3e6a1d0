"""How rejected rows of a context are taken back, chosen when it is opened."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from dflash_local.fit.architectures import OWN_STATE_ARCHITECTURES, REPLAY_ARCHITECTURES
from dflash_local.fit.options import MAX_OUTPUT_ROWS
from dflash_local.llama import native
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.redecode import Redecode
from dflash_local.target_model.replay import ReplayRollback
from dflash_local.target_model.rollback import Rollback, StateRollback

# isort: split
import llama_cpp.llama_cpp as api

MOST_AGAIN = 32
"""Rows that are decoded again at most with new ones. Without a limit, a pass would get ever longer
where some draft is rejected in each round."""


def has_states(model: Any) -> bool:
    """Whether a sequence of a model has a state that stands for all its tokens at once."""
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


class WayBack:
    """What the options ask for, as far as llama.cpp and this build can do it for the model.

    `open` comes next: it gives the `rollback` of the context's sequences, which the rest needs.
    """

    def __init__(self, model: Any, context: Any, options: TargetOptions) -> None:
        self._context = context
        self._n_seq = options.n_seq
        self._n_batch: int = api.llama_n_batch(context)
        architecture = _architecture(model)
        self._is_recurrent = has_states(model)
        self.keeps_checkpoints = self._is_recurrent and architecture not in OWN_STATE_ARCHITECTURES
        # 0 as well for an architecture of which llama.cpp keeps none
        self.n_snapshots: int = api.llama_n_rs_seq(context) if self._is_recurrent else 0
        replays = architecture in REPLAY_ARCHITECTURES and not self.n_snapshots
        can_replay = replays and native.can_replay(native.address(context))
        self.n_replayed = options.n_replayed if can_replay else 0
        self._n_returned = max(self.n_snapshots, self.n_replayed)
        self._redecodes = options.redecodes and self.keeps_checkpoints and not self._n_returned
        # With no layer but recurrent ones, llama.cpp splits a batch whose sequences are not next to
        # one another.
        has_attention = api.llama_model_is_hybrid(model)
        is_whole = self._n_returned > 0 or (self._redecodes and has_attention)
        self.in_graph = not self._is_recurrent or is_whole or options.n_seq == 1
        """Whether the graph of a pass sees all its rows."""
        self.needs_equal_rows = self._is_recurrent and self.in_graph
        """Whether all sequences of a pass must have the same number of rows: llama.cpp would split
        any other, and only the last part would be seen."""
        self.most_again = (
            min(MOST_AGAIN, self._n_batch // self._n_seq // 2) if self._redecodes else 0
        )
        self.rollback = Rollback()

    def open(self, passes: native.TargetPass) -> None:
        """Choose the rollback of a context with these passes."""
        if self.n_replayed:
            self.rollback = ReplayRollback(self._n_seq, passes)
        elif self._redecodes:
            self.rollback = Redecode(self._context, self._n_seq)
        elif self._is_recurrent:
            self.rollback = StateRollback(self._n_seq, self.n_snapshots)

    @property
    def max_width(self) -> int:
        """The most rows of one sequence in a pass of which all but the first can be taken back."""
        if self.most_again:
            return min(MAX_OUTPUT_ROWS, self._n_batch // self._n_seq - self.most_again)
        return 1 + self._n_returned if self._is_recurrent else MAX_OUTPUT_ROWS

    def n_again(self, seq: int) -> int:
        """How many rows the next pass over a sequence decodes again, before its new ones."""
        return len(self.rollback.again(seq))

    def alone(self, seqs: Iterable[int]) -> Iterator[Batch]:
        """The rows that the next passes over these sequences would decode again, in passes of their
        own. Each of them must be decoded before the next is asked for."""
        waiting: dict[int, list[int]] = {}
        for seq in seqs:
            if n := self.n_again(seq):
                waiting.setdefault(n, []).append(seq)
        for n, alike in waiting.items():
            most = max(self._n_batch // n, 1)
            for i in range(0, len(alike), most):
                batch = Batch()
                for seq in alike[i : i + most]:
                    batch.add(seq, *self.rollback.take_again(seq), outputs="none")
                yield batch

    def before(self, given: Batch) -> Iterator[Batch]:
        """What must be decoded again before a pass of these rows, which could not hold it, too."""
        if not self.most_again:
            return
        n_rows = Counter(given.seq_ids)
        n_again = {seq: self.n_again(seq) for seq in n_rows}
        if not any(n_again.values()):
            return
        totals = {n + n_again[seq] for seq, n in n_rows.items()}
        is_split = self.needs_equal_rows and len(totals) > 1
        if is_split or len(given) + sum(n_again.values()) > self._n_batch:
            yield from self.alone(n_again)


def _architecture(model: Any) -> str:
    name = ctypes.create_string_buffer(64)
    api.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
    return name.value.decode("utf-8", "replace")
