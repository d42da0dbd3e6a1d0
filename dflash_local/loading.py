"""From file names to a model at work: check, plan, try, load."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from pathlib import Path

from dflash_local import calibration, runtime
from dflash_local.branches import shared_out
from dflash_local.controller import Controller
from dflash_local.draft_shape import DraftShape, checked_shape
from dflash_local.drafter import Drafter
from dflash_local.drafter_spec import DrafterSpec
from dflash_local.drafters import open_drafter
from dflash_local.errors import DflashError
from dflash_local.gguf_file import GgufFile
from dflash_local.model import Model
from dflash_local.pairing import check_pair, check_target
from dflash_local.plan import Plan, make_plan
from dflash_local.prefix_key import check_store, open_store
from dflash_local.probe import ensure_loadable
from dflash_local.runtime import Device
from dflash_local.target import Target
from dflash_local.target_options import MAX_OUTPUT_ROWS, TargetOptions

Progress = Callable[[float], None]
"""Hears what part of a target is loaded."""

_QUIET_S = 2.0


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, if there is one, on disk, of which it is known that they fit."""

    target: GgufFile
    draft: GgufFile | None
    spec: DrafterSpec | None

    def plan(
        self,
        devices: List[Device],
        *,
        n_ctx: int | None = None,
        n_gpu_layers: int | None = None,
        n_batch: int = 512,
        flash_attn: bool = True,
        kv_type: str = "f16",
        split_mode: str = "layer",
        main_gpu: int = 0,
        tensor_split: List[float] | None = None,
        n_seq: int = 1,
        draft_window: int = 0,
        draft_shape: DraftShape | None = None,
    ) -> Plan:
        """What `load` would do on a machine of `devices`. Raises InputError for what does not fit
        there."""
        shape = usual_shape(devices, n_gpu_layers) if draft_shape is None else draft_shape
        return make_plan(
            self.target,
            self.draft,
            self.spec,
            n_ctx=n_ctx,
            n_gpu_layers=n_gpu_layers,
            kv_type=kv_type,
            n_seq=n_seq,
            n_batch=n_batch,
            n_outputs=min(n_batch, MAX_OUTPUT_ROWS * n_seq),
            flash_attn=flash_attn,
            draft_window=draft_window,
            n_branches=self.n_branches(shape, n_seq, n_batch),
            split_mode=split_mode,
            main_gpu=main_gpu,
            tensor_split=tensor_split,
            devices=devices,
        )

    def n_branches(self, draft_shape: DraftShape, n_seq: int, n_batch: int) -> int:
        """Sequence ids of each of `n_seq` sequences: 1 where drafts are chains, as are all of a
        drafter without a choice of candidates."""
        trees = draft_shape != "chain" and self.spec is not None and self.spec.runs_on == "fused"
        return shared_out(n_seq, n_batch) if trees else 1


def usual_shape(devices: List[Device], n_gpu_layers: int | None = None) -> DraftShape:
    """What drafts are where nobody says it: "auto" on a GPU, to which rows of one pass cost little.
    On a CPU each costs nearly as much as a pass, and chains are checked to the bit there."""
    uses_gpu = n_gpu_layers != 0 and any(device.type in ("gpu", "igpu") for device in devices)
    return "auto" if uses_gpu else "chain"


def open_pair(target: str | os.PathLike[str], draft: str | os.PathLike[str] | None = None) -> Pair:
    """Check both files, and that they fit: only headers are read. Raises FileError, PairError."""
    target_file = GgufFile.open(target)
    check_target(target_file)
    draft_file = GgufFile.open(draft) if draft is not None else None
    spec = check_pair(target_file, draft_file) if draft_file else None
    return Pair(target_file, draft_file, spec)


def load(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    *,
    n_ctx: int | None = None,
    n_gpu_layers: int | None = None,
    n_threads: int | None = None,
    n_batch: int = 512,
    flash_attn: bool = True,
    kv_type: str = "f16",
    split_mode: str = "layer",
    main_gpu: int = 0,
    tensor_split: List[float] | None = None,
    n_seq: int = 1,
    draft_window: int = 0,
    draft_shape: DraftShape | None = None,
    cache_mb: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    recalibrate: bool = False,
    quiet: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Load a GGUF target and, to draft for it, a DFlash drafter; without one, decode plainly.

    `n_ctx` (tokens) and `n_gpu_layers` (-1 for all): None takes what fits the free memory. The plan
    is printed to stderr unless `quiet`. `kv_type` is the type of the target's KV cache; `n_batch`
    the rows of one prompt batch; `split_mode` ("layer", "row", "none"), `main_gpu` and
    `tensor_split` are llama.cpp's way to spread a model over GPUs. `n_seq` sequences can be decoded
    at once, in the one context that they share. The drafter looks back at `draft_window` tokens of
    a sequence, and its cache holds hardly more of them; 0 is for all. That is the default, as no
    file says how long the texts were that its drafter was trained on. Beyond that length drafts are
    poor without a window: the shipped pair accepts 2.3 tokens a round after 1800 with a window of
    512, 1.1 without; after 500 both accept 2.6. Drafts are of `draft_shape`: a "chain", or a "tree"
    of which the target checks all branches in one pass, where the drafter gives several candidates
    for a position and llama.cpp has the sequence ids; "auto" takes what pays best; None is
    "auto" on a GPU and "chain" on a CPU. Prompts and answers that leave their slot are kept in
    `cache_mb` MiB of host memory and, with `cache_dir`, in as many MiB of files in that folder.
    `recalibrate` measures what drafting costs on this machine though it is known from an earlier
    time. `progress` hears the part of the target that is loaded, from 0 to 1, also where more is
    done before and after; what it raises ends the load. Raises FileError for bad files, PairError
    where the two do not fit, InputError for what does not fit the memory, with the numbers,
    BackendError where llama.cpp itself fails.
    """
    say = _silent if quiet else _to_stderr
    steps = _Steps(progress)
    steps(0.0)
    check_store(cache_mb, cache_dir)
    if draft is not None:
        calibration.budget_s()  # refused now: it is needed after what may take minutes
    devices = runtime.devices()
    shape = usual_shape(devices, n_gpu_layers) if draft_shape is None else draft_shape
    checked_shape(shape)
    pair = open_pair(target, draft)
    target_file, draft_file, spec = pair.target, pair.draft, pair.spec
    plan = pair.plan(
        devices,
        n_ctx=n_ctx,
        n_gpu_layers=n_gpu_layers,
        kv_type=kv_type,
        n_seq=n_seq,
        n_batch=n_batch,
        flash_attn=flash_attn,
        draft_window=draft_window,
        draft_shape=shape,
        split_mode=split_mode,
        main_gpu=main_gpu,
        tensor_split=tensor_split,
    )
    options = TargetOptions(
        n_ctx=plan.n_ctx,
        n_seq=plan.n_seq,
        n_batch=plan.n_batch,
        n_gpu_layers=plan.n_gpu_layers,
        n_threads=n_threads,
        flash_attn=flash_attn,
        kv_type=kv_type,
        split_mode=split_mode,
        main_gpu=main_gpu,
        tensor_split=plan.tensor_split,
        tapped_layers=spec.target_layers if spec else (),
        n_branches=pair.n_branches(shape, plan.n_seq, plan.n_batch),
    )
    for line in plan.lines():
        say(line)
    ensure_loadable(
        target_file.path,
        draft_file.path if draft_file else None,
        layers=options.tapped_layers,
        n_gpu_layers=plan.n_gpu_layers,
        spec=spec,
    )
    steps(0.0)
    loaded = _loaded(target_file.path, options, steps, say)
    try:
        steps(1.0)
        drafter = (
            open_drafter(
                draft_file.path,
                loaded,
                spec,
                n_seq=plan.n_seq,
                n_ctx=loaded.n_ctx,
                draft_window=plan.draft_window,
                for_trees=options.n_branches > 1,
            )
            if draft_file
            else None
        )
        steps(1.0)
        controller = _controller(loaded, drafter, say, recalibrate) if drafter else None
        store = open_store(loaded, drafter, cache_mb, cache_dir, say)
        model = Model(loaded, drafter, plan, controller=controller, store=store, say=say)
        model.draft_shape = shape
        if shape == "tree" and (reason := model.engine.chains_because):
            say(reason)
        return model
    except BaseException:
        loaded.close()
        raise


def _controller(
    target: Target, drafter: Drafter, say: Callable[[str], None], anew: bool
) -> Controller:
    def begin() -> None:
        once = "" if anew else ", once"
        say(f"measuring what drafting costs on this machine{once}: a few seconds")

    n_branches = target.options.n_branches
    # A wider tree would have a new graph in every round.
    n_nodes = max(n_branches, drafter.block_size) - 1 if n_branches > 1 else 0
    greedy, sampled = calibration.known_priors(target, drafter, n_nodes)
    costs = calibration.measure(target, drafter, before=begin, anew=anew)
    return Controller(costs, drafter.block_size, greedy, sampled, n_nodes)


def _loaded(
    path: Path, options: TargetOptions, steps: _Steps, say: Callable[[str], None]
) -> Target:
    try:
        return Target(path, options, progress=_Progress(path, steps, say))
    except DflashError:
        if steps.stopped is not None:
            raise steps.stopped from None
        raise


class _Steps:
    """Tells how far a load is, and keeps what ended it: no exception passes through llama.cpp."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.stopped: BaseException | None = None

    def __call__(self, part: float) -> None:
        if self._progress is not None:
            self._progress(part)

    def go_on(self, part: float) -> bool:
        try:
            self(part)
        except BaseException as error:
            self.stopped = error
        return self.stopped is None


class _Progress:
    """Says how much of a file is loaded, every few seconds, once it takes longer than a moment."""

    def __init__(self, path: Path, steps: _Steps, say: Callable[[str], None]) -> None:
        self._path = path
        self._steps = steps
        self._say = say
        self._next = time.monotonic() + _QUIET_S

    def __call__(self, part: float) -> bool:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _QUIET_S
            self._say(f"loading {self._path.name}: {part:.0%}")
        return self._steps.go_on(part)


def _to_stderr(line: str) -> None:
    if sys.stderr is not None:  # else print would take stdout
        print(line, file=sys.stderr, flush=True)


def _silent(_line: str) -> None:
    pass
