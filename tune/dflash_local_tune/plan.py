"""The plan of a training, by the memory of the GPU: of all weights or low-rank additions, beside
the target or by turns with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dflash_local.fit.footprint import size_text
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile
from dflash_local_tune.training import N_ANCHORS, n_by_muon, n_low_rank, n_trainable

_BYTES_EACH, _BY_MUON = 20, 16
"""Memory for each number that is trained: weight, gradient, running mean and two moments, all
float32. Muon has one moment."""
_BYTES_KEPT = 2
"""For each number that stays, in bfloat16."""
_SLACK = 3 << 30
"""Bytes of GPU memory for the output head, logits and activations of a step."""
_PASS_BYTES = 2 << 30
"""Of these, for the data that a pass over some answers keeps until it has gone back."""
_MOST_PACKED = 16
"""Answers of one pass. More leave a GPU no time for steps."""


@dataclass(frozen=True)
class TunePlan:
    """`n_weights`: numbers of the drafter that may be trained; `n_trained`: those that are,
    `n_by_muon` of them with Muon. `bytes` are those of the trainer on the GPU; `by_turns`: it is
    there only while the target is not. One pass takes `n_packed` answers of up to `answer_bytes`.
    `waiting_bytes`: those of answers on the disk that wait for the trainer, at most."""

    low_rank: bool
    by_turns: bool
    n_weights: int
    n_trained: int
    n_by_muon: int = 0
    n_packed: int = 1
    answer_bytes: int = 0
    waiting_bytes: int = 0

    @classmethod
    def of(
        cls,
        drafter: GgufFile,
        state: Mapping[str, Any],
        free: int | None,
        answer_bytes: int,
        *,
        from_nothing: bool = False,
        waiting_bytes: int = 0,
    ) -> TunePlan:
        """The plan for a GPU with `free` bytes beside the target, None on a CPU, which gains
        nothing from packing. A run that goes on from a `state` trains the same weights, whatever
        memory is free by now; so does one `from_nothing`, whose random weights are nothing to add
        to. No answers wait on a CPU, nor where target and trainer take turns."""
        n, n_low = n_trainable(drafter), n_low_rank(drafter)
        whole = cls(False, False, n, n, n_by_muon(drafter) if from_nothing else 0)
        low = cls(True, False, n, n_low)
        low_rank = bool(state["low_rank"]) if state else free is not None and whole.bytes > free
        low_rank = low_rank and not from_nothing
        found = low if low_rank else whole
        if free is None:
            return found
        by_turns = found.bytes > free
        room = _PASS_BYTES + max(0, free - found.bytes) // 2
        n_packed = max(1, min(_MOST_PACKED, room // answer_bytes))
        return replace(
            found,
            by_turns=by_turns,
            n_packed=n_packed,
            answer_bytes=answer_bytes,
            waiting_bytes=0 if by_turns else waiting_bytes,
        )

    @property
    def bytes(self) -> int:
        kept = _BYTES_KEPT * self.n_weights if self.low_rank else 0
        packed = max(0, self.n_packed * self.answer_bytes - _PASS_BYTES) if self.n_packed > 1 else 0
        return self._trained_bytes + kept + _SLACK + packed

    @property
    def _trained_bytes(self) -> int:
        """On the GPU. A state on the disk has the best weights in place of the gradients."""
        return _BYTES_EACH * self.n_trained - (_BYTES_EACH - _BY_MUON) * self.n_by_muon

    @property
    def disk_bytes(self) -> int:
        """While it runs: a new state is whole before the last one goes."""
        return 4 * self.n_weights + 2 * self._trained_bytes + self.waiting_bytes

    def lines(self, free: int | None) -> list[str]:
        """The plan in words, with `free` as for `of`."""
        what = f"to train: {self.n_trained / 1e6:.0f} million numbers"
        if self.low_rank:
            whole = TunePlan(False, False, self.n_weights, self.n_weights).bytes
            what += f", added to {self.n_weights / 1e6:.0f} million that stay: to train all takes "
            what += f"{size_text(whole)} of memory"
        if self.n_by_muon:
            what += f", {self.n_by_muon / 1e6:.0f} million of them with Muon"
        if free is None:
            return [f"{what}; on the CPU"]
        needed, left = size_text(self.bytes), size_text(free)
        if self.by_turns:
            return [
                what,
                f"target and trainer take the GPU by turns: the trainer needs {needed}, more than "
                f"the {left} that are free beside the target",
            ]
        return [what, f"memory: up to {needed} of the {left} that are free beside the target"]


def answer_bytes(spec: DrafterSpec, n_ctx: int, n_anchors: int = N_ANCHORS) -> int:
    """Bytes of one answer of `n_ctx` tokens in a pass of the trainer on a GPU."""
    n_rows = n_anchors * spec.block_size
    # Bytes of a row, as PyTorch's autocast keeps them for the way back, and gradients of logits.
    logits = (28 if spec.markov_rank else 24) * spec.n_vocab
    scores = 8 * spec.n_head * (n_ctx + spec.block_size)
    layer = scores + 60 * spec.n_embd + 20 * spec.n_ff
    return n_rows * (logits + spec.n_layer * layer)


def free_bytes(device: str) -> int | None:
    """Memory that is free on a GPU; None for a CPU, whose memory is not counted."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else None
