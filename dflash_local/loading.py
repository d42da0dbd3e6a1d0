"""From file names to a loaded model: check the files, plan, try them, load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from dflash_local.controller import calibration
from dflash_local.controller.controller import Controller
from dflash_local.cuda.few_rows import FewRows, open_few_rows
from dflash_local.draft.drafter import Drafter
from dflash_local.draft.fused_drafter import TREE_TOP_K, FusedDrafter
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine, most_nodes
from dflash_local.errors import DflashError, FileError, InputError
from dflash_local.fit.options import MAX_COPY_FROM, LoadOptions
from dflash_local.fit.plan import Plan
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import runtime
from dflash_local.llama.gpus import advice, has_nvidia_driver, listed_gpus
from dflash_local.llama.runtime import Device
from dflash_local.model import Model
from dflash_local.pair import Pair, open_pair
from dflash_local.pairs.defaults import defaults_of
from dflash_local.pairs.find import find_pair
from dflash_local.prefixes.files import PrefixFiles
from dflash_local.prefixes.store import PrefixStore
from dflash_local.printable import to_stderr
from dflash_local.target_model.bare_pass import takes_back
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from dflash_local.text_file import read_text
from dflash_local.trial.model import ensure_loadable

Progress = Callable[[float], None]
"""Called with the fraction of a target that is loaded, 0 to 1."""
Say = Callable[[str], None]
"""Called with each line for the user."""

_QUIET_S = 2.0
_NO_GAIN = (
    "drafting is off: it could not pay here even if every draft were accepted, so no snapshots of "
    "the recurrent state are kept; a draft width set at the load keeps them, and `dflash-local "
    "calibrate` measures again"
)
_NO_WAY_BACK = (
    "drafting is off: the target has recurrent layers, whose state cannot be taken back here"
)
_NO_REPLAY = (
    "this device cannot replay the recurrent state, so rejected drafts are taken back another way:"
)
_FEWER_SNAPSHOTS = (
    "llama.cpp's graph has room for {} snapshots of this target's recurrent state; planned again:"
)
_NO_WIDTH = (
    "drafting is off: the draft width was 0 at the load, so no further recurrent states are kept"
)


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
    tensor_split: Sequence[float] | None = None,
    n_seq: int = 1,
    draft_window: int | None = None,
    draft_shape: DraftShape | None = None,
    draft_width: int | Literal["auto"] | None = None,
    cache_mb: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    exact: bool = False,
    recalibrate: bool = False,
    thinking: bool | None = None,
    draft_from: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
) -> Model:
    """Load a GGUF target and the DFlash drafter that drafts for it.

    `target` and `draft` are paths of GGUF files, folders that hold one, or places on the hub:
    `owner/repo`, `owner/repo:Q8_0`, an address. `target` may be a name of the registry, too, as in
    `load("qwen3-8b")`: it stands for both. What is not on this disk is fetched, once the memory is
    known to suffice. Without `draft`, the drafter is the name's own, or a `dflash-*.gguf` in the
    target's folder or repository. A target that is given as a file has none. What the registry or
    the target's file advises for sampling and thinking is the default of all requests.

    What a text repeats is drafted, too, as copies: beside a drafter, and without one where it costs
    nothing when it is not used. "copies" in place of a drafter asks for it also where that takes
    snapshots (see below). `draft_from` is a file of further text to copy from.

    `n_ctx` (tokens) and `n_gpu_layers` (-1 for all): None takes what fits the free memory. The plan
    is printed to stderr unless `quiet` is set. `kv_type` is the type of the target's KV cache,
    `n_batch` the rows of one prompt batch. `split_mode` ("layer", "row", "none"), `main_gpu` and
    `tensor_split` spread a model over GPUs as in llama.cpp. `n_seq` sequences can be decoded at
    once. They share one context.

    `draft_window` is how many tokens of a sequence the drafter looks back at. Its cache then holds
    little more than that. 0 means all. None, the default, is the length of the texts on which the
    drafter was trained, where the registry knows it, or else all. Beyond that length drafts are
    poor without a window: after 1800 tokens the shipped pair makes 2.3 tokens per round with a
    window of 512, and 1.1 without one. After 500 tokens it makes 2.6 either way.

    `draft_shape`: "chain"; "tree", whose branches the target checks in one pass; "auto", whichever
    pays best. None is "auto" on a GPU and "chain" on a CPU. Trees need a drafter that gives several
    candidates for a position, and enough sequence ids of llama.cpp.

    `draft_width` is that of requests that name none: target rows of a verify pass, 0 for plain
    decoding, "auto", the default with a drafter or copies, for what pays best. To draft for a
    target with recurrent layers takes one state more for each sequence. For some it takes
    snapshots, which slow down every step, or accepted rows are decoded again. Such a target is
    loaded without these, and without its drafter, at a width of 0 or 1. It is loaded without
    snapshots and drafter, too, if no number is given and drafting could not pay on this machine
    even if every draft were accepted. Then all requests are decoded plainly, and their
    `stats.drafting` says why.

    Prompts and answers that leave their slot are kept in `cache_mb` MiB of host memory and, with
    `cache_dir`, in as many MiB of files in that folder. `exact` makes answers depend on their own
    request alone, in any `kv_type`, plain ones to the bit on a CPU (see docs/exactness.md):
    requests run one after the other, drafts are chains, and of earlier prompts only whole batches
    of `n_batch` tokens are used again. `recalibrate` measures again what drafting costs on this
    machine. `thinking`: whether chats that do not say ask their template for thoughts; None is what
    suits the pair, if that is known, or else what the template does. `progress` is called with the
    fraction of the target that is loaded, from 0 to 1, and again between the later steps. If it
    raises, the load ends. `say` gets the lines that a user should read, now and later, in place of
    stderr; with `progress`, none about percentages.

    Raises FileError for bad files, PairError if the two do not fit each other, InputError with the
    numbers if they do not fit the memory, BackendError if llama.cpp itself fails.
    """
    options = LoadOptions(
        n_ctx=n_ctx,
        n_gpu_layers=n_gpu_layers,
        n_threads=n_threads,
        n_batch=n_batch,
        flash_attn=flash_attn,
        kv_type=kv_type,
        split_mode=split_mode,
        main_gpu=main_gpu,
        tensor_split=tensor_split,
        n_seq=n_seq,
        draft_window=draft_window,
        draft_shape=draft_shape,
        draft_width=draft_width,
        cache_mb=cache_mb,
        cache_dir=cache_dir,
        exact=exact,
        recalibrate=recalibrate,
        draft_from=draft_from,
    )
    percent = say is None or progress is None
    say = say or (_silent if quiet else to_stderr)
    files = find_pair(target, draft, say=say, options=options)
    pair = open_pair(files.target, files.draft)
    engine, plan = open_engine(
        pair, options, say=say, progress=progress, percent=say if percent else _silent
    )
    defaults = defaults_of(pair.target, pair.draft, thinking)
    for line in defaults.lines():
        say(line)
    model = Model(engine, plan, say=say)
    model.sampling, model.sampling_by_thinking = defaults.sampling, defaults.by_thinking
    model.thinking = defaults.thinking
    model.answer_length = defaults.answer_length
    if draft_width is not None:
        # A recurrent state may take back fewer rows than the files allow: known once it is loaded.
        most = engine.widest(model.draft_shape)
        if draft_width != "auto" and draft_width > most:
            model.close()
            limit = engine.limit(model.draft_shape)
            raise InputError(f"draft_width is {draft_width}; {limit} allows at most {most}")
        model.draft_width = draft_width
    return model


def open_engine(
    named: Pair,
    options: LoadOptions,
    *,
    say: Say,
    progress: Progress | None = None,
    percent: Say | None = None,
) -> tuple[Engine, Plan]:
    """The engine that `load` makes a model of, and its plan. `percent` gets the lines about how
    much is loaded; without it, `say` does. Raises what `load` raises."""
    progress = progress or _silent
    progress(0.0)
    further = _text_of(options.draft_from)
    devices = runtime.devices()
    if named.used(devices, options).may_copy(options):
        calibration.budget_s()  # a bad value is refused now, not after minutes of loading
    if options.n_gpu_layers != 0 and not any(d.type in ("gpu", "igpu") for d in devices):
        _tell_unused_gpu(say)
    shape = named.shape(devices, options)
    if isinstance(options.draft_width, int):
        named.check_width(options.draft_width, shape)
    pair, plan, wanted = _tried(named, devices, options, say)
    progress(0.0)
    few_rows = _few_rows(pair, plan, options, say)
    loaded = _loaded(pair.target.path, wanted, progress, percent or say, few_rows)
    try:
        progress(1.0)
        if loaded.n_replayed and not takes_back(loaded):
            say(_NO_REPLAY)
            where = replace(options, n_gpu_layers=plan.n_gpu_layers)
            pair, plan, wanted = _tried(replace(named, may_replay=False), devices, where, say)
            loaded.reopen(wanted)
        is_alone = pair.draft is not named.draft or pair.copies != named.copies
        plain_because = _NO_WIDTH if is_alone else None
        drafter = None
        if pair.draft:
            drafter = open_drafter(
                pair.draft.path,
                loaded,
                pair.spec,
                n_seq=plan.n_seq,
                n_ctx=loaded.n_ctx,
                draft_window=plan.draft_window,
                for_trees=wanted.n_branches > 1,
            )
        if few_rows:
            say(few_rows.line)
        progress(1.0)
        copies = controller = None
        if pair.copies and loaded.max_width < 2:
            plain_because = _NO_WAY_BACK
            say(plain_because)
        elif pair.may_copy(options) and loaded.max_width > 1:
            copies = calibration.known_copies(loaded, drafter)
            controller = _controller(loaded, drafter, say, options.recalibrate)
        if controller and loaded.n_snapshots and not isinstance(options.draft_width, int):
            most = pair.spec.block_size if pair.spec else loaded.max_width
            width = min(loaded.max_width, most)
            if controller.costs.best_gain(width - 1, plan.n_seq) <= 1:
                plain_because, pair, drafter, controller = _NO_GAIN, pair.alone(), None, None
                copies = None
                say(plain_because)
                fixed = replace(options, n_ctx=plan.n_ctx, n_gpu_layers=plan.n_gpu_layers)
                plan = pair.plan(devices, fixed)
                loaded.reopen(_target_options(pair, plan, options, shape))
        store = _open_store(loaded, drafter, options, say)
        engine = Engine(
            loaded,
            drafter,
            plan.n_seq,
            controller,
            store=store,
            exact=options.exact,
            copies=copies,
        )
        engine.usual_shape, engine.plain_because = shape, plain_because
        engine.copy_from = _tokens_of(further, loaded)
        if shape == "tree" and (reason := engine.chains_because):
            say(reason)
        return engine, plan
    except BaseException:
        loaded.close()
        raise


def _tried(
    named: Pair, devices: Sequence[Device], options: LoadOptions, say: Say
) -> tuple[Pair, Plan, TargetOptions]:
    """What is used of a pair here, the plan, and how the target is opened: as a child process has
    shown that it can be."""
    pair = named.used(devices, options)
    plan = pair.plan(devices, options)
    for line in plan.lines():
        say(line)
    wanted = _target_options(pair, plan, options, named.shape(devices, options))
    n_snapshots = ensure_loadable(
        pair.target.path,
        pair.draft.path if pair.draft else None,
        layers=wanted.tapped_layers,
        n_gpu_layers=plan.n_gpu_layers,
        n_snapshots=wanted.n_snapshots,
        n_replayed=wanted.n_replayed,
        redecodes=wanted.redecodes,
        say=say,
    )
    if n_snapshots < wanted.n_snapshots:
        say(_FEWER_SNAPSHOTS.format(n_snapshots))
        return _tried(replace(named, most_snapshots=n_snapshots), devices, options, say)
    return pair, plan, wanted


_gpus_are_told = False


def _tell_unused_gpu(say: Say) -> None:
    """Say once in a process that there is a GPU that llama.cpp does not see."""
    global _gpus_are_told
    if _gpus_are_told:
        return
    _gpus_are_told = True
    told = advice(listed_gpus(), has_nvidia_driver(), runtime.INSTALL)
    if told:
        say(f"{told} (--gpu-layers 0, if the CPU is meant)")


def _text_of(path: str | os.PathLike[str] | None) -> str:
    """The text of a file, read before anything is loaded. Raises FileError."""
    if path is None:
        return ""
    try:
        return read_text(path).removeprefix("\ufeff")
    except OSError as error:
        raise FileError(f"{os.fspath(path)}: no text to draft from: {error.strerror}") from None


def _tokens_of(text: str, target: Target) -> list[int]:
    """The tokens of further text to copy from. Raises InputError for too many."""
    if not text:
        return []
    tokens = target.vocabulary.tokenize(text, special=False, add_special=False)
    if len(tokens) > MAX_COPY_FROM:
        raise InputError(
            f"the text to draft from has {len(tokens)} tokens; give a file of at most "
            f"{MAX_COPY_FROM}"
        )
    return tokens


def open_drafter(
    path: str | os.PathLike[str],
    target: Target,
    spec: DrafterSpec | None = None,
    *,
    n_seq: int,
    n_ctx: int,
    draft_window: int = 0,
    n_threads: int | None = None,
    for_trees: bool = False,
) -> Drafter:
    """The drafter at `path` for a loaded target, which closes it.

    `spec` is what its file says, if that was read already. The drafter has `n_ctx` rows for each of
    `n_seq` sequences. Drafts look at the last `draft_window` of them; 0: at all. `for_trees` asks
    for several candidates for each position. Raises FileError for a bad file, BackendError if the
    memory does not suffice.
    """
    if spec is None:
        spec = read_drafter(GgufFile.open(path), n_vocab=target.n_vocab)
    return FusedDrafter(
        path,
        target,
        spec,
        n_seq=n_seq,
        n_ctx=n_ctx,
        draft_window=draft_window,
        top_k=TREE_TOP_K if for_trees else 1,
        n_threads=n_threads,
    )


def _target_options(
    pair: Pair, plan: Plan, options: LoadOptions, shape: DraftShape
) -> TargetOptions:
    return TargetOptions(
        n_ctx=plan.n_ctx,
        n_seq=plan.n_seq,
        n_batch=plan.n_batch,
        n_gpu_layers=plan.n_gpu_layers,
        n_threads=options.n_threads,
        flash_attn=options.flash_attn,
        kv_type=options.kv_type,
        split_mode=options.split_mode,
        main_gpu=options.main_gpu,
        tensor_split=plan.tensor_split,
        tapped_layers=pair.spec.target_layers if pair.spec else (),
        n_branches=pair.n_branches(shape, plan.n_seq, plan.n_batch),
        n_snapshots=plan.n_snapshots,
        n_replayed=plan.n_replayed,
        redecodes=plan.redecodes,
        exact=options.exact,
    )


def _controller(target: Target, drafter: Drafter | None, say: Say, again: bool) -> Controller:
    def begin() -> None:
        once = "" if again else ", once"
        say(f"measuring what drafting costs on this machine{once}: a few seconds")

    n_branches = target.options.n_branches
    n_nodes = most_nodes(n_branches, drafter.block_size) if drafter and n_branches > 1 else 0
    greedy = sampled = None
    if drafter:
        greedy, sampled = calibration.known_drafts(target, drafter, n_nodes)
    costs = calibration.measure(target, drafter, before=begin, again=again)
    if costs.noise:
        say(costs.noise)
    return Controller(
        costs,
        min(drafter.block_size, target.max_width) if drafter else 1,
        greedy,
        sampled,
        n_nodes,
        n_copied=target.max_width - 1,
        equal_rows=target.needs_equal_rows and target.options.n_seq > 1,
    )


def _open_store(
    target: Target, drafter: Drafter | None, options: LoadOptions, say: Say
) -> PrefixStore:
    """A store of `cache_mb` MiB in memory and, with a folder, as much on disk.

    Raises InputError for a folder that cannot be used.
    """
    max_bytes = options.cache_mb << 20
    files = None
    if options.cache_dir is not None:
        key = state_key(target, drafter) | ({"exact": True} if options.exact else {})
        files = PrefixFiles(options.cache_dir, key, max_bytes, say)
    return PrefixStore(max_bytes, files)


def state_key(target: Target, drafter: Drafter | None) -> dict[str, Any]:
    """Everything that saved keys, values and drafter rows depend on, for JSON.

    It contains every option of the target, except for those that are known not to matter. So no new
    option can be forgotten here. `n_ctx` matters: llama.cpp chooses RoPE factors by it.
    """
    options = asdict(target.options)
    for name in (
        "n_seq",
        "n_branches",
        "tapped_layers",
        "n_snapshots",
        "n_replayed",
        "redecodes",
        "exact",  # of the store, which adds it
    ):
        del options[name]
    options["n_threads"] = target.n_threads  # None is as many as this machine has cores
    key: dict[str, Any] = {
        "machine": target.machine(),
        "target": target.file_key,
        "options": options,
    }
    if drafter is not None:
        key["drafter"] = [type(drafter).__name__, drafter.file_key, drafter.draft_window]
    return key


def _few_rows(pair: Pair, plan: Plan, options: LoadOptions, say: Say) -> FewRows | None:
    """Our own kernels for what lies on GPUs, each matrix whole on one of them."""
    if plan.n_gpu_layers == 0 or options.split_mode == "row":
        return None
    files = [file for file in (pair.target, pair.draft) if file]
    return open_few_rows(files, say, again=options.recalibrate)


def _loaded(
    path: Path, options: TargetOptions, progress: Progress, say: Say, few_rows: FewRows | None
) -> Target:
    """The target at `path`. Every few seconds `say` gets a line on how much of it is loaded. What
    `progress` raises ends the load, and is raised after it: none may pass through llama.cpp."""
    next_line = time.monotonic() + _QUIET_S
    stopped: BaseException | None = None

    def report(part: float) -> bool:
        nonlocal next_line, stopped
        now = time.monotonic()
        if now >= next_line:
            next_line = now + _QUIET_S
            say(f"loading {path.name}: {part:.0%}")
        try:
            progress(part)
        except BaseException as error:
            stopped = error
        return stopped is None

    try:
        return Target(path, options, progress=report, few_rows=few_rows)
    except DflashError:
        if stopped is not None:
            raise stopped from None
        raise


def _silent(_news: object) -> None:
    pass
