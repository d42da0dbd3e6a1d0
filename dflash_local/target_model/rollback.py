"""The lengths to which each sequence of a context can be cut now. Pure: it knows only numbers.

Attention has a cell for each token, so a sequence can be cut anywhere. A recurrent state stands for
all tokens at once. llama.cpp can keep *snapshots* of it, one after each of the last rows of a
sequence's last pass, and cut back to one of them. It does not check enough: where there is no
snapshot, its `seq_rm` may succeed and leave a wrong state. So the limits are kept here.
"""

from collections import Counter
from collections.abc import Sequence


class Rollback:
    """For attention: anything is possible, so there is nothing to note."""

    def shortest(self, seq: int) -> int:
        """The least length, besides 0, to which a sequence can be cut now."""
        return 0

    def can_copy(self, seq: int, length: int) -> bool:
        """Whether another sequence can share the first `length` tokens of this one now."""
        return True

    def begin_pass(self) -> None:
        """A pass of the context begins, and may fail."""

    def end_pass(self, seqs: Sequence[int], positions: Sequence[int]) -> None:
        """It has succeeded, with these rows."""

    def take_back(self, seq: int, length: int) -> bool:
        """Cut a sequence to `length`, which is in reach and not 0. False: llama.cpp is to do it."""
        return False

    def cut(self, seq: int, length: int) -> None:
        """A sequence has been cut to `length`, or cleared."""

    def share(self, source: int, target: int) -> None:
        """Sequence `target` now shares all tokens of `source`."""

    def restore(self, seq: int, length: int) -> None:
        """A sequence of `length` tokens has got its state back from a checkpoint."""

    def tidy(self) -> None:
        """Begin the work that the next pass would wait for, while the device is busy."""

    def wait(self) -> None:
        """Return when llama.cpp's memory can be read and replaced: no device writes to it."""


class StateRollback(Rollback):
    """For recurrent states, with snapshots after the last `n_rows` rows of a pass."""

    def __init__(self, n_seq: int, n_rows: int) -> None:
        self._n_rows = n_rows
        self._lengths = [0] * n_seq
        self._spare = [0] * n_seq
        """For each sequence, the number of its last tokens that can be taken back."""
        self._is_cut = [False] * n_seq
        """Whether a sequence is cut and its next pass will begin with a snapshot. Until then it
        cannot be cut again, and the state that others would share is not yet in its place."""

    def shortest(self, seq: int) -> int:
        return self._lengths[seq] - self._spare[seq]

    def can_copy(self, seq: int, length: int) -> bool:
        # A copy always has the whole state.
        return length == self._lengths[seq] and not self._is_cut[seq]

    def begin_pass(self) -> None:
        # A pass may move the states of other sequences, but it leaves their snapshots behind.
        self._spare = [0] * len(self._spare)

    def end_pass(self, seqs: Sequence[int], positions: Sequence[int]) -> None:
        for seq, n in Counter(seqs).items():
            # The state before the pass is gone, so its first row stays.
            self._spare[seq] = min(n - 1, self._n_rows)
            self._is_cut[seq] = False
        for seq, position in zip(seqs, positions, strict=True):
            self._lengths[seq] = position + 1

    def cut(self, seq: int, length: int) -> None:
        if length < self._lengths[seq]:
            self._lengths[seq], self._spare[seq] = length, 0
            self._is_cut[seq] = length > 0

    def share(self, source: int, target: int) -> None:
        # They share one cell with its snapshots until one of them decodes.
        self._spare[source] = 0
        self.restore(target, self._lengths[source])

    def restore(self, seq: int, length: int) -> None:
        self._lengths[seq], self._spare[seq], self._is_cut[seq] = length, 0, False
