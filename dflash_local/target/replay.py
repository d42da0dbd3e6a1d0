"""Sequences of gated delta nets, whose rejected rows are taken back by replay.

No snapshots are kept. What such a layer consumed stays on its device until the next pass, and the
rows that are kept are computed into the state before the pass once more (`native/state_replay.cpp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dflash_local.target.rollback import Rollback


class Replays(Protocol):
    """What is used of a `native.TargetPass`."""

    can_keep: bool

    def keep(self, seq: int, n_kept: int) -> None: ...
    def wait(self) -> None: ...


class ReplayRollback(Rollback):
    """All rows of a sequence's last pass but the first can be taken back, if they were few."""

    def __init__(self, n_seq: int, passes: Replays) -> None:
        self._passes = passes
        self._lengths = [0] * n_seq
        self._begins = [0] * n_seq
        """The length of each sequence before its last pass, or now if nothing can be taken back."""

    def shortest(self, seq: int) -> int:
        return min(self._begins[seq] + 1, self._lengths[seq])

    def can_copy(self, seq: int, length: int) -> bool:
        # A copy always has the whole state.
        return length == self._lengths[seq]

    def begin_pass(self) -> None:
        self._begins = list(self._lengths)

    def end_pass(self, seqs: Sequence[int], positions: Sequence[int]) -> None:
        for seq, position in zip(seqs, positions, strict=True):
            self._lengths[seq] = position + 1
        if not self._passes.can_keep:
            self._begins = list(self._lengths)

    def take_back(self, seq: int, length: int) -> bool:
        if length >= self._lengths[seq]:
            return False
        self._passes.keep(seq, length - self._begins[seq])
        return True

    def cut(self, seq: int, length: int) -> None:
        self._lengths[seq] = min(self._lengths[seq], length)
        self._begins[seq] = min(self._begins[seq], length)

    def share(self, source: int, target: int) -> None:
        # They share one state until one of them decodes.
        self.restore(source, self._lengths[source])
        self.restore(target, self._lengths[source])

    def restore(self, seq: int, length: int) -> None:
        self._lengths[seq] = self._begins[seq] = length

    def wait(self) -> None:
        self._passes.wait()
