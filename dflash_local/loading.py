"""From file names to a loaded model: check the files, plan, try them, load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product, starmap
from typing import TYPE_CHECKING, Any, Literal

from dflash_local import disk_cache, records
from dflash_local.controller.calibration import budget_s
from dflash_local.controller.controller import Controller
from dflash_local.controller.costs import Costs
from dflash_local.cuda.few_rows import FewRows, open_few_rows
from dflash_local.draft.assistant_drafter import AssistantDrafter
from dflash_local.draft.drafter import Drafter
from dflash_local.draft.fused_drafter import TREE_TOP_K, FusedDrafter
from dflash_local.draft.fused_heads import FusedHeads
from dflash_local.draft.heads_drafter import HeadsDrafter
from dflash_local.draft.model_drafter import ModelDrafter
from dflash_local.drafter_choice import choose
from dflash_local.engine.engine import Engine, most_nodes
from dflash_local.errors import BackendError, DflashError, FileError, InputError, PairError
from dflash_local.fit.options import MAX_COPY_FROM, LoadOptions, LoadSettings, check_names
from dflash_local.fit.plan import Plan
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.drafter_spec import AssistantSpec, DrafterSpec, HeadsSpec, ModelSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import runtime
from dflash_local.llama.gpus import advice, has_nvidia_driver, listed_gpus
from dflash_local.model import Model
from dflash_local.pair import Pair, open_pair
from dflash_local.pairs.defaults import defaults_of
from dflash_local.pairs.find import PairFiles, find_pair
from dflash_local.pairs.projector import find_projector, without_projector
from dflash_local.prefixes.files import PrefixFiles, SlotFiles
from dflash_local.prefixes.store import PrefixStore
from dflash_local.printable import silent, to_stderr
from dflash_local.setup import NO_HEADS, Setup, machine_devices, split_by_layers_because
from dflash_local.target_model.bare_pass import takes_back
from dflash_local.target_model.exactness import check_others
from dflash_local.target_model.projector import Projector
from dflash_local.target_model.target import Target
from dflash_local.text_file import read_text
from dflash_local.trial.model import ensure_loadable

if TYPE_CHECKING:
    from typing_extensions import Unpack

Progress = Callable[[float], None]
"""Called with the fraction of a target that is loaded, 0 to 1."""
Say = Callable[[str], None]
"""Called with each line for the user."""

_QUIET_S = 2.0


def load(
    target: str | os.PathLike[str] | PairFiles,
    draft: str | os.PathLike[str] | None = None,
    *,
    thinking: bool | None = None,
    sampling: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    quiet: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
    check: Callable[[Model], object] | None = None,
    **settings: Unpack[LoadSettings],
) -> Model:
    """Load a GGUF target and the drafter that drafts for it: a DFlash drafter, a small model
    with the same vocabulary, or an assistant, heads of Gemma 4 in a file of their own.

    `target` and `draft` are paths of GGUF files, folders that hold one, or places on the hub:
    `owner/repo`, `owner/repo:Q8_0`, an address. `target` may be a name of the registry, too, as in
    `load("qwen3-8b")`, which stands for both, or what `find_pair` found. What is not on this disk
    is fetched, once the memory is known to suffice. Without `draft`, the drafter is the name's own,
    or a file with `dflash` in its name in the target's folder or repository. A target that is given
    as a file has none. One without a drafter drafts with the heads of its own file (layers that
    predict further tokens), if it has any that can be used and the memory holds them. One with both
    drafts with the faster of them: the first load measures that, in some seconds. "none" is no
    drafter at all. What the registry or the target's file advises for sampling and thinking is the
    default of all requests.

    What a text repeats is drafted, too, as copies: beside a drafter, and without one where it costs
    nothing when it is not used. "copies" in place of a drafter asks for it also where that takes
    snapshots (see below). "mtp" in its place asks for the heads, and no other drafter.
    `draft_from` is a file of further text to copy from.

    `n_ctx` (tokens) and `n_gpu_layers` (-1 for all): None takes what fits the free memory. Of a
    mixture that does not fit, the experts of the first `n_cpu_moe` layers are in RAM; None takes as
    many as needed, `cpu_moe` all. `override_tensor` has patterns of tensors' names, and a device
    for each, such as `{r"blk\\.[0-3]\\.ffn_.*_exps": "CPU"}`; the first pattern counts. The plan is
    printed to stderr unless `quiet` is set. `kv_type` is the type of the target's KV cache,
    `cache_type_k` and `cache_type_v` those of its keys and its values alone,
    `n_batch` the rows of one prompt batch. `split_mode` ("layer", "none"; "row" and "tensor" are
    "layer"), `main_gpu` and `tensor_split` spread a model over GPUs
    as in llama.cpp; `device` names the GPUs to use. `load_mode` is llama.cpp's: "none" reads the
    file into memory, "mlock" keeps it there. `rope_scaling` ("none", "linear", "yarn"),
    `rope_scale`, `rope_freq_base`, `rope_freq_scale` and the `yarn_` numbers stretch the target's
    positions, for a context beyond its training; the drafter's stay as they are. `override_kv` has
    keys of the target's file, and other values for them.
    `mmproj` is the GGUF file of a projector, with which a vision model reads images: see
    `Model.chat_prompt`. Without it, it is the only `mmproj*.gguf` beside the only target in a
    folder; "none" is none, and "auto" the one beside the target or in the repository on the hub
    that it comes from, fetched if it is missing.
    `rpc` are further machines as "HOST:PORT", each with a `dflash-local worker`;
    their devices come first. `lora` are adapters, and `control_vectors` control vectors, as GGUF
    files: "FILE", or "FILE:SCALE" for one that shall act more or less. `n_seq` sequences can be
    decoded at once. They share one context.

    `draft_window` is how many tokens of a sequence the drafter looks back at. Its cache then holds
    little more than that. 0 means all. None, the default, is the length of the texts on which the
    drafter was trained, where the registry knows it, or else all. Beyond that length drafts are
    poor without a window: after 1800 tokens the tests' pair makes 2.3 tokens per round with a
    window of 512, and 1.1 without one. After 500 tokens it makes 2.6 either way.

    `draft_shape`: "chain"; "tree", whose branches the target checks in one pass; "auto", whichever
    pays best. None is "auto" on a GPU and "chain" on a CPU. Trees need a drafter that gives several
    candidates for a position, and enough sequence ids of llama.cpp.

    `draft_width` is that of requests that name none: target rows of a verify pass, 0 for plain
    decoding, "auto", the default with a drafter or copies, for what pays best. To draft for a
    target with recurrent layers takes one state more for each sequence, or snapshots, which slow
    down every step. Such a target is loaded without snapshots, and without its drafter, at a width
    of 0 or 1, and if no number is given and drafting could not pay on this machine even if every
    draft were accepted. Where neither works, there are no drafts. Then all requests are decoded
    plainly, and their `stats.drafting` says why.

    Prompts and answers that leave their slot are kept in `cache_mb` MiB of host memory and, with
    `cache_dir`, in as many MiB of files in that folder. `Model.save_slot` has files of its own in
    the folder `slot_save_path`. `exact` makes answers depend on their own
    request alone, in any `kv_type`, plain ones to the bit on a CPU, and on an NVIDIA GPU with our
    kernels drafted ones, too (see docs/exactness.md): drafts are chains, and of earlier prompts
    only whole batches of `n_batch` tokens are used again. Each of `n_seq` sequences then has an
    equal part of the context; more than one where a row rounds alike beside others.
    `recalibrate` measures again what drafting costs on this machine. `thinking`: whether chats that
    do not say ask their template for thoughts; None is what suits the pair, if that is known, or
    else what the template does. `sampling` are options of requests that do not give
    them, such as `{"temperature": 0.7}`, and come before what is advised.
    `chat_template` is Jinja text in place of the target's own template. `progress` is called with
    the fraction of the target that is loaded, from 0 to 1, and again between the later steps. If it
    raises, the load ends. `say` gets the lines that a user should read, now and later, in place of
    stderr; with `progress`, none about percentages. `check` gets the model before it is measured
    what drafting costs, which takes seconds: what it raises ends the load, as for a prompt that is
    too long.

    Raises FileError for bad files, PairError if the two do not fit each other, InputError with the
    numbers if they do not fit the memory, BackendError if llama.cpp itself fails, and its subclass
    WorkerLostError if a worker does not answer.
    """
    check_names(settings, LoadSettings.__annotations__, "load", "help(dflash_local.load) has them")
    options = LoadOptions(**settings)
    percent = say is None or progress is None
    say = say or (silent if quiet else to_stderr)
    files = target
    if isinstance(files, PairFiles) and draft is not None:
        raise InputError("these files have their drafter: leave out draft, or name two files")
    if not isinstance(files, PairFiles):
        files = find_pair(files, draft, say=say, options=options)
    trial = partial(open_engine, say=silent, progress=lambda _: (progress or silent)(0.0))
    files, why = choose(files, options, say, trial)
    pair = _with_keys(open_pair(files.target, files.draft), options, say)
    options = replace(options, mmproj=find_projector(files.target, options.mmproj, say))
    engine, plan, measure = _open(
        pair, options, say=say, progress=progress, percent=say if percent else silent
    )
    defaults = defaults_of(pair.target, pair.draft, thinking, sampling or {})
    for line in defaults.lines():
        say(line)
    if why is not None:
        plan = replace(plan, notes=(*plan.notes, why))
    model = Model(engine, plan, say=say)
    model.sampling, model.sampling_by_thinking = defaults.sampling, defaults.by_thinking
    model.thinking = defaults.thinking
    model.answer_length = defaults.answer_length
    try:
        if options.mmproj is not None:
            model.projector = Projector(options.mmproj, model.target)
        if chat_template is not None:
            model.target.chat_template = chat_template
            model.prepare_chat()
        if (width := options.draft_width) is not None:
            _check_width(engine, width)
            model.draft_width = width
        if check is not None:
            check(model)
        measure()
    except BaseException:
        model.close()
        raise
    return model


def open_engine(
    pair: Pair, options: LoadOptions, *, say: Say, progress: Progress | None = None
) -> tuple[Engine, Plan]:
    """The engine that `load` makes a model of, and its plan. Raises what `load` raises."""
    engine, plan, measure = _open(pair, options, say=say, progress=progress)
    try:
        measure()
    except BaseException:
        engine.target.close()
        raise
    return engine, plan


def _check_width(engine: Engine, width: int | Literal["auto"]) -> None:
    """A recurrent state may take back fewer rows than the files allow: known once it is loaded.
    Raises InputError."""
    shape = engine.usual_shape
    most = engine.widest(shape)
    if width != "auto" and width > most:
        raise InputError(
            f"draft_width is {width}, and {engine.plain_because}"
            if engine.plain_because
            else f"draft_width is {width}; {engine.limit(shape)} allows at most {most}"
        )


def _open(
    pair: Pair,
    options: LoadOptions,
    *,
    say: Say,
    progress: Progress | None = None,
    percent: Say | None = None,
) -> tuple[Engine, Plan, Callable[[], None]]:
    """An engine, its plan, and what to call before its first request: it measures what drafting
    costs, if need be. `percent` gets the lines about how much is loaded; without it, `say` does."""
    progress = progress or silent
    progress(0.0)
    further = _text_of(options.draft_from)
    setup = _tried(_planned(pair, options, say), say)
    progress(0.0)
    target = _loaded(setup, progress, percent or say, _few_rows(setup, say))
    try:
        progress(1.0)
        setup, drafter, controller = _with_drafter(setup, target, progress, say)
        engine = _engine(setup, target, drafter, controller, say)
        engine.copy_from = _tokens_of(further, target)
    except BaseException:
        target.close()
        raise

    def measure() -> None:
        if engine.copies is None or engine.controller is not None:
            return
        try:
            engine.control(_controller(target, drafter, say, options.recalibrate))
        except BackendError as fault:
            if not setup.named.by_default:
                raise
            why = f"{NO_HEADS} {fault}"
            engine.decode_plainly(why)
            say(why)

    return engine, setup.plan, measure


def _with_keys(pair: Pair, options: LoadOptions, say: Say) -> Pair:
    """The pair with other values for keys, without heads that nobody asked for if these do not go
    with them. Raises as `open_pair`."""
    try:
        return pair.with_keys(options.override_kv)
    except PairError as fault:
        if not pair.by_default:
            raise
        target_only = pair.without_drafts().with_keys(options.override_kv)
        say(f"{NO_HEADS} {fault}")
        return target_only


def _planned(pair: Pair, options: LoadOptions, say: Say) -> Setup:
    """The first setup to try, by numbers alone."""
    devices = without_projector(machine_devices(options), options.mmproj)
    if told := split_by_layers_because(options, devices):
        say(told)
        options = replace(options, split_mode="layer")
    setup = Setup(pair, options, devices).fitting()
    is_cpu_meant = options.n_gpu_layers == 0 or options.device
    if not is_cpu_meant and not any(d.type in ("gpu", "igpu") for d in setup.devices):
        _tell_unused_gpu(say)
    setup.check_width()
    setup.check_exact()
    if setup.may_copy:
        budget_s()  # a bad value is refused now, not after minutes of loading
    return setup


def _with_drafter(
    setup: Setup, target: Target, progress: Progress, say: Say
) -> tuple[Setup, Drafter | None, Controller | None]:
    """The setup that a loaded target can do, with its drafter, if it has one that works; and with a
    controller already where drafts must pay for snapshots."""
    if target.way_back.kind == "replay" and not takes_back(target):
        try:
            setup = _tried(setup.without_replay(), say)
        except BackendError as fault:  # the memory may not hold the target twice
            return _without_drafter(setup.without_drafts(f"drafting is off: {fault}"), target, say)
        target.reopen(setup.target_options)
    try:
        drafter = _drafter_of(setup, target, say)
        if target.few_rows:
            say(target.few_rows.line)
        progress(1.0)
        # Drafts must pay for the snapshots that they take, unless a width is wanted.
        is_wanted = isinstance(setup.options.draft_width, int)
        if not _may_copy(setup, target) or is_wanted or target.way_back.kind != "snapshots":
            return setup, drafter, None
        controller = _controller(target, drafter, say, setup.options.recalibrate)
    except BackendError as fault:
        if not setup.named.by_default:
            raise
        return _without_drafter(setup.without_drafts(f"{NO_HEADS} {fault}"), target, say)
    width = min(target.max_width, drafter.block_size if drafter else target.max_width)
    if best_gain(controller.costs, width - 1, setup.plan.n_seq) > 1:
        return setup, drafter, controller
    return _without_drafter(setup.without_drafts(), target, say)


def _without_drafter(setup: Setup, target: Target, say: Say) -> tuple[Setup, None, None]:
    """A loaded target as a setup without drafts has it."""
    say(setup.finding)
    target.reopen(setup.target_options)
    return setup, None, None


def _engine(
    setup: Setup, target: Target, drafter: Drafter | None, controller: Controller | None, say: Say
) -> Engine:
    """The engine on all of this, with its caches. Raises as `_open_store`."""
    options = setup.options
    if target.options.has_streams:
        check_others(target)
    key = state_key(target, drafter, exact=options.exact)
    engine = Engine(
        target,
        drafter,
        setup.plan.n_seq,
        controller,
        store=_open_store(options, key, say),
        exact=options.exact,
        copies=records.known_copies(target, drafter) if _may_copy(setup, target) else None,
    )
    engine.usual_shape, engine.plain_because = setup.shape, setup.plain_because
    if options.slot_save_path is not None:
        engine.slot_files = SlotFiles(options.slot_save_path, key)
    if setup.shape == "tree" and (reason := engine.chains_because):
        say(reason)
    return engine


def _may_copy(setup: Setup, target: Target) -> bool:
    return setup.may_copy and target.max_width > 1


def _tried(setup: Setup, say: Say) -> Setup:
    """This setup, or the next one with fewer snapshots, that a child process could load."""
    for line in setup.lines():
        say(line)
    pair, way_back = setup.pair, setup.plan.way_back
    try:
        found = ensure_loadable(
            pair.target.path,
            pair.draft.path if pair.draft else None,
            layers=setup.target_options.tapped_layers,
            n_gpu_layers=0 if setup.options.rpc else setup.plan.n_gpu_layers,
            way_back=way_back,
            how=setup.how_loaded,
            say=say,
        )
    except FileError as fault:
        if not pair.by_default:
            raise
        return _tried(setup.without_heads(str(fault)), say)
    if pair.draft is not None and isinstance(pair.spec, ModelSpec):
        n_gpu_layers = setup.model_drafter_options.n_gpu_layers
        ensure_loadable(pair.draft.path, None, layers=(), n_gpu_layers=n_gpu_layers, say=say)
    return setup if found == way_back else _tried(setup.with_snapshots(found.rows), say)


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


def open_heads(target: Target, spec: HeadsSpec, *, n_seq: int, n_ctx: int, say: Say) -> Drafter:
    """The heads of a loaded target's own file, which it closes: in one graph of ours if it can
    compute them where they are, else in llama.cpp's context for them, and a line says why. `n_seq`
    and `n_ctx` are as for `open_drafter`. Raises BackendError if the memory does not suffice."""
    layer = "the target's positions are stretched" if target.options.bends_rope else spec.layer
    if not isinstance(layer, str):
        try:
            return FusedHeads(target, spec, layer, n_seq=n_seq, n_ctx=n_ctx)
        except (FileError, BackendError) as error:
            layer = str(error)
    say(f"the target's own heads draft step by step, in llama.cpp's context: {layer}")
    return HeadsDrafter(target, spec, n_seq=n_seq, n_ctx=n_ctx)


def _drafter_of(setup: Setup, target: Target, say: Say) -> Drafter | None:
    """The drafter of a setup for its loaded target."""
    draft, spec = setup.pair.draft, setup.pair.spec
    if draft is None:
        return None
    if isinstance(spec, ModelSpec):
        return ModelDrafter(draft.path, target, spec, setup.model_drafter_options)
    if isinstance(spec, AssistantSpec):
        return AssistantDrafter(draft.path, target, spec, setup.assistant_options)
    if isinstance(spec, HeadsSpec):
        return open_heads(target, spec, n_seq=setup.plan.n_seq, n_ctx=target.n_ctx_all, say=say)
    return open_drafter(
        draft.path,
        target,
        spec,
        n_seq=setup.plan.n_seq,
        n_ctx=target.n_ctx,
        draft_window=setup.plan.draft_window,
        for_trees=target.options.n_branches > 1,
    )


def _controller(target: Target, drafter: Drafter | None, say: Say, again: bool) -> Controller:
    def begin() -> None:
        once = "" if again else ", once"
        say(f"measuring what drafting costs on this machine{once}: a few seconds")

    n_branches = target.options.n_branches
    n_nodes = most_nodes(n_branches, drafter.block_size) if drafter and n_branches > 1 else 0
    greedy = sampled = None
    if drafter:
        greedy, sampled = records.known_drafts(target, drafter, n_nodes)
    costs = records.costs(target, drafter, before=begin, again=again)
    if costs.noise:
        say(costs.noise)
    if not records.read(target, drafter):
        try:
            where = f"{disk_cache.place()} cannot be written"
        except OSError:
            where = "this user has no home folder"
        say(
            f"{where}, so what was measured is not kept; set {disk_cache.ENVIRONMENT} to a folder "
            "that can be written"
        )
    return Controller(
        costs,
        min(drafter.block_size, target.max_width) if drafter else 1,
        greedy,
        sampled,
        n_nodes,
        n_copied=target.max_width - 1,
        equal_rows=target.wants_equal_rows and target.options.n_seq > 1,
        pads=target.needs_equal_rows and target.options.n_seq > 1,
        few_counts=target.options.n_gpu_layers != 0,
    )


def best_gain(costs: Costs, n_draft: int, n_seqs: int) -> float:
    """The speed-up over plain decoding if every draft were accepted: at the best measured depth,
    with the best number of drafts up to `n_draft`, for one sequence or for `n_seqs`."""

    def gain(depth: int, n: int, width: int) -> float:
        plain_s = costs.step_s(n, depth) + costs.host_s
        draft_s = costs.draft_s(n, depth, n_draft + 1 - width) + costs.draft_host_s
        return width * plain_s / (draft_s + costs.step_s(n * width, depth) + costs.host_s)

    ways = product(costs.depths, {1, n_seqs}, range(2, n_draft + 2))
    return max(starmap(gain, ways), default=0.0)


def _open_store(options: LoadOptions, key: Mapping[str, Any], say: Say) -> PrefixStore:
    """A store of `cache_mb` MiB in memory and, with a folder, as much on disk.

    Raises InputError for a folder that cannot be used.
    """
    max_bytes = options.cache_mb << 20
    files = None
    if options.cache_dir is not None:
        files = PrefixFiles(options.cache_dir, key, max_bytes, say)
    return PrefixStore(max_bytes, files)


def state_key(target: Target, drafter: Drafter | None, *, exact: bool = False) -> dict[str, Any]:
    """Everything that saved keys, values and drafter rows depend on, for JSON. `exact` is the
    engine's.

    It contains every option of the target, except for those that are known not to matter. So no new
    option can be forgotten here. `n_ctx` matters: llama.cpp chooses RoPE factors by it.
    """
    options = asdict(target.options)
    # `exact` is the engine's; adapters are in the files' key, and each prefix knows their scales;
    # the kernels that read in place are in the machine's.
    for name in ("n_seq", "n_branches", "tapped_layers", "way_back", "exact", "lora", "in_place"):
        del options[name]
    options["n_threads"] = target.n_threads  # None is as many as this machine has cores
    key: dict[str, Any] = {
        "machine": target.machine(),
        "target": target.file_key,
        "options": options,
    }
    if drafter is not None:
        key["drafter"] = [type(drafter).__name__, drafter.file_key, drafter.draft_window]
    # Where sequences have cells of their own, llama.cpp writes how many these are.
    return key | ({"exact": target.options.n_seq} if exact else {})


def _few_rows(setup: Setup, say: Say) -> FewRows | None:
    """Our own kernels for what lies on GPUs, each matrix whole on one of them. None with adapters
    and control vectors, whose graphs they were not measured in."""
    options = setup.options
    adapted = options.lora or options.control_vectors
    if setup.plan.n_gpu_layers == 0 or options.rpc or adapted:
        return None
    files = [file for file in (setup.pair.target, setup.pair.draft) if file]
    return open_few_rows(
        files, say, kv_types=options.kv_types, exact=options.exact, again=options.recalibrate
    )


def _loaded(setup: Setup, progress: Progress, say: Say, few_rows: FewRows | None) -> Target:
    """The target of a setup. Every few seconds `say` gets a line on how much of it is loaded. What
    `progress` raises ends the load, and is raised after it: none may pass through llama.cpp."""
    path = setup.pair.target.path
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
        return Target(path, setup.target_options, progress=report, few_rows=few_rows)
    except DflashError:
        if stopped is not None:
            raise stopped from None
        raise
