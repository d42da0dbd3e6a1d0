"""Takes rows of a recurrent state back where llama.cpp keeps no snapshots of it: what was accepted
is decoded again.

Each sequence has a second id of llama.cpp, its *spare*, which can have the same recurrent state.
That costs nothing: the next pass writes the sequence's new state elsewhere and leaves the spare's
as it was before. If some rows of that pass are rejected, the sequence gets this state back. It then
lacks the accepted rows, too. They are decoded once more at the beginning of its next pass, before
the rows that are new. If all rows of a pass stay, as in plain decoding, nothing is left to decode
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_local.target_model.batch import Batch
from dflash_local.target_model.rollback import Rollback

# isort: split
import llama_cpp.llama_cpp as api


@dataclass
class _State:
    """A sequence of `base` tokens and those that came `later`.

    `is_back`: its state in llama.cpp has only the first `base` tokens; else it has all. The spare,
    if `is_kept`, has a state, which is that after `base` tokens wherever there are later ones.
    """

    base: int = 0
    later: list[int] = field(default_factory=list)
    is_back: bool = False
    is_kept: bool = False

    @property
    def length(self) -> int:
        return self.base + len(self.later)


class Redecode(Rollback):
    """For all sequences of a context, which has as many ids again for the spares."""

    def __init__(self, context: Any, n_seq: int) -> None:
        self._memory = api.llama_get_memory(context)
        self._n_seq = n_seq
        self._states = [_State() for _ in range(n_seq)]
        self._passing: dict[int, list[int]] = {}
        """Of each sequence in a pass, the tokens that it may lose again; none if it keeps all."""

    def shortest(self, seq: int) -> int:
        return self._states[seq].base

    def can_copy(self, seq: int, length: int) -> bool:
        return length == self._states[seq].length

    def again(self, seq: int) -> Sequence[int]:
        state = self._states[seq]
        return state.later if state.is_back else ()

    def take_again(self, seq: int) -> tuple[int, Sequence[int]]:
        state = self._states[seq]
        later = self.again(seq)
        if later:
            state.later, state.is_back = [], False
        return state.base, later

    def extend(self, batch: Batch) -> Batch:
        n_new = Counter(batch.seq_ids)
        wanted = Counter(seq for seq, out in zip(batch.seq_ids, batch.output, strict=True) if out)
        found = Batch()
        self._passing = {}
        for row, seq in enumerate(batch.seq_ids):
            # Prompts and single rows are never taken back.
            is_kept = 1 < n_new[seq] == wanted[seq]
            if seq not in self._passing:
                later = self._begin(seq, is_kept=is_kept)
                if later:
                    found.add(seq, self._states[seq].base, later, outputs="none")
                self._passing[seq] = list(later) if is_kept else []
            if is_kept:
                self._passing[seq].append(batch.tokens[row])
            found.give(batch, row)
        return found

    def _begin(self, seq: int, *, is_kept: bool) -> Sequence[int]:
        """Let the spare have the sequence's state before a pass if `is_kept`, or nothing. Returns
        the tokens that the pass begins with."""
        state = self._states[seq]
        if not state.is_back:
            state.base, state.later = state.length, []
        if is_kept and not (state.is_back and state.is_kept):
            self._share(seq, self._spare(seq))
            state.is_kept = True
        elif not is_kept:
            self._drop(seq)
        return state.later

    def end_pass(self, seqs: Sequence[int], positions: Sequence[int]) -> None:
        lengths = {seq: position + 1 for seq, position in zip(seqs, positions, strict=True)}
        for seq, length in lengths.items():
            state = self._states[seq]
            state.later, state.is_back = self._passing.get(seq, []), False
            state.base = length - len(state.later)
        self._passing = {}

    def go_back(self, seq: int, length: int) -> int:
        state = self._states[seq]
        if not state.base <= length < state.length:
            return length
        if not state.is_back:
            self._share(self._spare(seq), seq)
            state.is_back = True
        return state.base

    def cut(self, seq: int, length: int) -> None:
        state = self._states[seq]
        if not length:
            self.restore(seq, 0)
        elif length < state.length:
            del state.later[length - state.base :]
            state.is_back = bool(state.later)

    def share(self, source: int, target: int) -> None:
        state = self._states[source]
        self.restore(target, state.length)
        if state.is_back:
            copied = self._states[target]
            copied.base, copied.later, copied.is_back = state.base, list(state.later), True

    def restore(self, seq: int, length: int) -> None:
        self._drop(seq)
        self._states[seq] = _State(length)

    def _spare(self, seq: int) -> int:
        return self._n_seq + seq

    def _share(self, source: int, target: int) -> None:
        # A recurrent state is copied whole. No position is named, so attention copies no cell.
        api.llama_memory_seq_cp(self._memory, source, target, 0, 0)

    def _drop(self, seq: int) -> None:
        state = self._states[seq]
        if state.is_kept:
            api.llama_memory_seq_rm(self._memory, self._spare(seq), -1, -1)
            state.is_kept = False
