"""The files of a target and its drafter, and what a machine can make of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_local.draft.shape import DraftShape, checked_shape
from dflash_local.errors import InputError
from dflash_local.fit.architectures import (
    RECURRENT_ARCHITECTURES,
    SNAPSHOT_ARCHITECTURES,
    rolls_back,
)
from dflash_local.fit.options import (
    COPIES,
    COPY_SNAPSHOTS,
    MAX_OUTPUT_ROWS,
    SNAPSHOT_ROWS,
    LoadOptions,
)
from dflash_local.fit.pairing import check_pair, check_target
from dflash_local.fit.plan import Plan, make_plan
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.runtime import Device
from dflash_local.pairs.defaults import draft_window_of
from dflash_local.target_model.cells import branches_of_each
from dflash_local.target_model.replay import can_replay


@dataclass(frozen=True)
class Pair:
    """The files of a target and, if there is one, of a drafter that fits it. `copies`: copies were
    asked for in place of a drafter."""

    target: GgufFile
    draft: GgufFile | None
    spec: DrafterSpec | None
    copies: bool = False
    may_replay: bool = True
    """False once rows could not be replayed here."""
    most_snapshots: int = MAX_OUTPUT_ROWS
    """How many snapshots llama.cpp can keep of the target's state; fewer once that was tried."""

    def plan(self, devices: Sequence[Device], options: LoadOptions) -> Plan:
        """What `load` would do on a machine with these devices. Raises InputError for what does not
        fit there."""
        if options.draft_window is None:
            options = replace(options, draft_window=draft_window_of(self.draft))
        shape = self.shape(devices, options)
        pair = self.used(devices, options)
        n_returned = pair.n_returned(options.n_batch)

        def planned(*, n_snapshots: int = 0, n_replayed: int = 0, redecodes: bool = False) -> Plan:
            return make_plan(
                pair.target,
                pair.draft,
                pair.spec,
                options,
                devices,
                n_branches=pair.n_branches(shape, options.n_seq, options.n_batch),
                n_snapshots=n_snapshots,
                n_replayed=n_replayed,
                redecodes=redecodes,
            )

        if n_returned and self._replays(devices, options):
            plan = planned(n_replayed=n_returned)
            if plan.n_gpu_layers == 0 or plan.n_gpu_layers >= plan.n_layers - 1:
                return plan  # all layers that repeat are on one side
        n_snapshots = min(n_returned, self.most_snapshots)
        if self.target.architecture in SNAPSHOT_ARCHITECTURES and (n_snapshots or not n_returned):
            return planned(n_snapshots=n_snapshots)
        return planned(redecodes=n_returned > 0)

    def used(self, devices: Sequence[Device], options: LoadOptions) -> Pair:
        """The pair as it is loaded: without its drafter where requests decode plainly and further
        recurrent states would only take memory and time."""
        keeps_states = self.n_returned(options.n_batch) and not self._replays(devices, options)
        return self.alone() if keeps_states and options.draft_width in (0, 1) else self

    def _replays(self, devices: Sequence[Device], options: LoadOptions) -> bool:
        possible = can_replay(self.target.architecture, devices, options.n_gpu_layers)
        return self.may_replay and possible

    def alone(self) -> Pair:
        """The target without a drafter."""
        return replace(self, draft=None, spec=None, copies=False)

    def shape(self, devices: Sequence[Device], options: LoadOptions) -> DraftShape:
        """The draft shape of requests that name none: copies alone are chains."""
        if self.draft is None and (options.draft_shape is None or not self.may_copy(options)):
            return "chain"
        return usual_shape(devices, options)

    def may_copy(self, options: LoadOptions) -> bool:
        """Whether what a text repeats is drafted: with a drafter, where it was asked for, and
        elsewhere if it slows no step down and may be of use."""
        if self.draft is not None or self.copies:
            return True
        is_plain = options.exact or options.draft_width in (0, 1)
        return not is_plain and self.target.architecture not in RECURRENT_ARCHITECTURES

    def check_width(self, width: int, shape: DraftShape) -> None:
        """Refuse what no load of these files can verify in one pass. Raises InputError."""
        trees = shape != "chain" and self.target.architecture not in RECURRENT_ARCHITECTURES
        most, limit = MAX_OUTPUT_ROWS, "a verify pass"
        if self.spec and not trees:
            most, limit = min(self.spec.n_draft + 1, most), "this drafter's block"
        if width > most:
            raise InputError(f"draft_width is {width}; {limit} allows at most {most}")

    def n_branches(self, shape: DraftShape, n_seq: int, n_batch: int) -> int:
        """Branches of each of `n_seq` sequences. It is 1 if drafts are chains, as they are for a
        drafter that gives only one candidate per position, and for a target with a recurrent state,
        which follows one path."""
        trees = shape != "chain"
        trees = trees and self.target.architecture not in RECURRENT_ARCHITECTURES
        return branches_of_each(n_seq, n_batch) if trees else 1

    def n_returned(self, n_batch: int) -> int:
        """The rows that must be taken back from a recurrent state if a whole draft is rejected, as
        far as a batch allows. 0 for a target without such a state, for one that cannot take rows
        back, and where nothing is drafted."""
        name = self.target.architecture
        if name not in RECURRENT_ARCHITECTURES or not rolls_back(name):
            return 0
        if self.spec is None and not self.copies:
            return 0
        most = min(self.spec.n_draft, MAX_OUTPUT_ROWS - 1) if self.spec else COPY_SNAPSHOTS
        return max(1, min(most, n_batch - SNAPSHOT_ROWS))


def usual_shape(devices: Sequence[Device], options: LoadOptions) -> DraftShape:
    """The draft shape of requests that name none.

    Without an option it is "auto" on a GPU, where more rows in a pass cost little. On a CPU it is
    "chain": each row costs nearly as much as a pass, and chains are exact to the bit there.
    """
    if options.draft_shape is not None:
        return checked_shape(options.draft_shape)
    if options.exact:
        return "chain"
    uses_gpu = options.n_gpu_layers != 0 and any(d.type in ("gpu", "igpu") for d in devices)
    return "auto" if uses_gpu else "chain"


def open_pair(target: str | os.PathLike[str], draft: str | os.PathLike[str] | None = None) -> Pair:
    """Check both files and whether they fit. Only headers are read. `draft` may be "copies". Raises
    FileError, PairError."""
    target_file = GgufFile.open(target)
    check_target(target_file)
    if draft is not None and os.fspath(draft) == COPIES:
        return Pair(target_file, None, None, copies=True)
    draft_file = GgufFile.open(draft) if draft is not None else None
    spec = check_pair(target_file, draft_file) if draft_file else None
    return Pair(target_file, draft_file, spec)
