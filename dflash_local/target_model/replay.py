"""Sequences of gated delta nets and short convolutions, whose rejected rows are taken back by
replay.

No snapshots are kept. The inputs of such a layer stay on its device until the next pass, and the
rows that are kept are computed once more into the state before it (`native/state_replay.cpp`).
"""

from collections.abc import Sequence
from typing import Any

from dflash_local.fit.architectures import CELLS, REPLAY_ARCHITECTURES, WayBack
from dflash_local.fit.placement import usable_gpus
from dflash_local.llama import native
from dflash_local.llama.runtime import Device, api
from dflash_local.target_model.rollback import Rollback, StateRollback

_TRIED = "CUDA"
"""The GPUs on which it was tried. The others keep snapshots."""


def can_replay(architecture: str, devices: Sequence[Device], n_gpu_layers: int | None) -> bool:
    """Whether rows of such a target can be taken back by replay here. The layers must be on the CPU
    or on GPUs, not on both."""
    gpus = usable_gpus(devices) if n_gpu_layers != 0 else []
    is_tried = all(gpu.name.startswith(_TRIED) for gpu in gpus)
    return architecture in REPLAY_ARCHITECTURES and is_tried and bool(native.can_replay())


class ReplayRollback(Rollback):
    """All rows of a sequence's last pass but the first can be taken back, if they were few."""

    def __init__(self, n_seq: int, passes: native.TargetPass) -> None:
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

    def tidy(self) -> None:
        self._passes.start_replay()

    def wait(self) -> None:
        self._passes.wait()


def possible(wanted: WayBack, architecture: str, context: Any) -> WayBack:
    """The wanted way back of a recurrent state, as far as llama.cpp and this build have it."""
    if n_snapshots := api.llama_n_rs_seq(context):  # 0 for architectures without any
        return WayBack("snapshots", n_snapshots)
    replays = wanted.by("replay") and architecture in REPLAY_ARCHITECTURES
    return wanted if replays and native.can_replay(native.address(context)) else CELLS


def rollback(
    way_back: WayBack, is_recurrent: bool, n_seq: int, passes: native.TargetPass
) -> Rollback:
    """The limits to which the sequences of a context with these passes can be cut."""
    if way_back.kind == "replay":
        return ReplayRollback(n_seq, passes)
    return StateRollback(n_seq, way_back.rows) if is_recurrent else Rollback()
