"""How much context and how many layers fit this machine, decided before anything is loaded.

What the user fixed is kept, what is left open is chosen so that it fits, and what cannot fit is an
InputError with the numbers. A margin on each device covers what `Footprint` cannot know: scratch
pools of kernels, fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import InputError
from .memory import Footprint, Use, cells, gpu_use, host_use, size_text

if TYPE_CHECKING:
    from .gguf_file import GgufFile
    from .pairing import DrafterSpec
    from .runtime import Device

KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MAX_CONTEXT = 1 << 24
# Contexts taken when none is asked for. A CPU needs minutes to read a longer prompt.
DEFAULT_CONTEXT, DEFAULT_CONTEXT_CPU, SMALL_CONTEXT, LEAST_CONTEXT = 32768, 8192, 4096, 2048

_PIPELINE_COPIES = 4  # GGML_SCHED_MAX_COPIES, in force with several GPUs


@dataclass(frozen=True)
class Plan:
    """Settings to load with, and the bytes that they take."""

    n_ctx: int
    """Tokens, as asked for; llama.cpp's cache has `n_cells`."""
    n_cells: int
    n_gpu_layers: int
    """As llama.cpp counts: the output layer is one. At 0, give llama.cpp no GPU at all."""
    n_layers: int
    """The most that `n_gpu_layers` can be."""
    n_batch: int
    """Tokens of a batch; a ubatch has at most 512."""
    n_seq: int
    kv_type: str
    tensor_split: tuple[float, ...] | None
    """For llama.cpp when several GPUs are in use: makes it place layers as counted here."""
    gpus: tuple[Use, ...]
    """In llama.cpp's order; those that the plan leaves alone included."""
    host: Use
    target_name: str
    target_bytes: int
    drafter_name: str | None
    drafter_bytes: int
    kv_bytes: int
    drafter_kv_bytes: int
    """At the end of the context; this cache grows in steps."""
    draft_window: int = 0
    """Tokens that the drafter looks back at; 0: the whole context."""
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Use, ...]:
        return (*self.gpus, self.host)

    @property
    def compute_bytes(self) -> int:
        return sum(use.compute for use in self.devices)

    def lines(self) -> list[str]:
        """The plan in words, for stderr."""
        used = [use.name for use in self.gpus if use.layers]
        layers = f"{self.n_gpu_layers} of {self.n_layers} layers on {', '.join(used)}"
        target, kv = size_text(self.target_bytes), size_text(self.kv_bytes)
        drafter, drafter_kv = size_text(self.drafter_bytes), size_text(self.drafter_kv_bytes)
        head = used[-1] if used else self.host.name
        window = f" for the last {self.draft_window} tokens" if self.draft_window else ""
        return [
            f"target: {self.target_name}, {target}, {layers if used else f'all on {head}'}",
            f"drafter: {self.drafter_name}, {drafter}, cache up to {drafter_kv}{window}, on {head}"
            if self.drafter_name
            else "drafter: none, plain decoding",
            f"context: {self.n_ctx} tokens, {self.kv_type} KV cache of {kv}",
            f"memory: {'; '.join(use.brief for use in self.devices)}",
            *(f"note: {note}" for note in self.notes),
        ]


def make_plan(
    target: GgufFile,
    drafter: GgufFile | None,
    spec: DrafterSpec | None,
    *,
    n_ctx: int | None = None,
    n_gpu_layers: int | None = None,
    kv_type: str = "f16",
    n_seq: int = 1,
    n_batch: int = 512,
    n_outputs: int | None = None,
    flash_attn: bool = True,
    draft_window: int = 0,
    split_mode: str = "layer",
    main_gpu: int = 0,
    tensor_split: Sequence[float] | None = None,
    devices: Sequence[Device],
) -> Plan:
    """The plan for this machine; `devices` as `runtime.devices()` gives them.

    `n_ctx` and `n_gpu_layers`: None chooses. With all layers on GPUs, the context is what the
    target was trained on, at most 32768, halved until it fits, down to 4096; failing that, 4096
    with as many layers on GPUs as fit, then 2048. `n_gpu_layers` -1 means all. `n_outputs` is
    llama.cpp's `n_outputs_max`, None what Target takes. `draft_window` is how many tokens the
    drafter looks back at, 0 for all. Raises InputError.
    """
    _check_whole("n_ctx", n_ctx, 16, MAX_CONTEXT)
    _check_whole("n_gpu_layers", n_gpu_layers, -1, None)
    _check_whole("n_seq", n_seq, 1, 256)
    _check_whole("n_batch", n_batch, 1, 65536)
    _check_whole("n_outputs", n_outputs, 1, 65536)
    _check_whole("draft_window", draft_window, 0, MAX_CONTEXT)
    _check_kv_type(target, kv_type, flash_attn)
    model = Footprint(
        target,
        drafter,
        spec,
        kv_type=kv_type,
        n_seq=n_seq,
        n_batch=n_batch,
        n_outputs=n_outputs,
        flash_attn=flash_attn,
        draft_window=draft_window,
    )
    machine = _Machine(model, devices, split_mode, main_gpu, tensor_split)
    most = model.n_blocks + 1 if machine.gpus else 0
    if n_gpu_layers is None:
        layers = list(range(most, -1, -1))
    else:
        layers = [most if n_gpu_layers < 0 else min(n_gpu_layers, most)]
    contexts = [n_ctx] if n_ctx else _contexts(model.trained, on_gpu=layers[0] > 0)
    context, count, host, gpus = machine.choose(contexts, layers, fixed=n_ctx is not None)

    notes = []
    if n_gpu_layers and not machine.gpus:
        notes.append(f"n_gpu_layers is {n_gpu_layers}, but llama.cpp found no GPU")
    if context > model.trained:
        notes.append(f"the target was trained on {model.trained} tokens, fewer than {context}")
    if count < most and n_gpu_layers is None:
        notes.append(f"{most - count} layers stay on the CPU: the free GPU memory holds no more")
    if host.needed + machine.mapped(count) > host.usable:
        notes.append("the weights exceed the free memory of the host: decoding may read the disk")
    return Plan(
        n_ctx=context,
        n_cells=cells(context),
        n_gpu_layers=count,
        n_layers=model.n_blocks + 1,
        n_batch=min(n_batch, cells(context)),
        n_seq=n_seq,
        kv_type=kv_type,
        tensor_split=_split([use.layers for use in gpus]),
        gpus=gpus,
        host=host,
        target_name=target.path.name,
        target_bytes=model.weights,
        drafter_name=drafter.path.name if drafter else None,
        drafter_bytes=model.drafter_weights,
        kv_bytes=model.kv(context, range(model.n_blocks)),
        drafter_kv_bytes=model.drafter_kv(context),
        draft_window=draft_window,
        notes=tuple(notes),
    )


class _Machine:
    """The host and the GPUs, in llama.cpp's order, as places for one model's layers."""

    def __init__(
        self,
        model: Footprint,
        devices: Sequence[Device],
        split_mode: str,
        main_gpu: int,
        tensor_split: Sequence[float] | None,
    ) -> None:
        if split_mode not in ("none", "layer", "row"):
            raise InputError(f"split_mode is {split_mode!r}, expected 'none', 'layer' or 'row'")
        gpus = _gpus(devices)
        _check_whole("main_gpu", main_gpu, 0, max(0, len(gpus) - 1))
        if split_mode == "none":
            gpus = gpus[main_gpu : main_gpu + 1]
        shares = [float(share) for share in tensor_split or ()]
        if any(not 0 <= share < float("inf") for share in shares) or (
            gpus and split_mode != "none" and len(shares) > len(gpus)
        ):
            raise InputError(
                f"tensor_split is {shares}, expected at most {len(gpus)} finite shares, one for "
                "each GPU, none negative"
            )
        self._model = model
        self._shares = shares + [0.0] * (len(gpus) - len(shares)) if any(shares) else []
        cpu = next(device for device in devices if device.type == "cpu")
        self._host = host_use(cpu.name, cpu.free, cpu.total)
        # A GPU that reports nothing lives on the host's memory, as far as llama.cpp is concerned.
        self._shares_host = [gpu.shares_host or not gpu.total for gpu in gpus]
        self.gpus = tuple(
            gpu_use(gpu.name, own.free, own.total)
            for gpu in gpus
            for own in [gpu if gpu.total else cpu]
        )
        self._copies = _PIPELINE_COPIES if len(self.gpus) > 1 else 1

    def choose(
        self, contexts: list[int], layers: list[int], fixed: bool
    ) -> tuple[int, int, Use, tuple[Use, ...]]:
        """The first that fits: context, layers on GPUs, host, GPUs. Raises InputError.

        A long context does not pay for layers on the CPU, which cost every token: only the small
        ones are tried with fewer layers than the most.
        """
        small = contexts if fixed else [c for c in contexts if c <= SMALL_CONTEXT] or contexts
        tries = [(context, layers[0]) for context in contexts if context >= small[0]]
        tries += [(context, count) for context in small for count in layers]
        for context, count in tries:
            host, gpus = self.place(context, count)
            if not self._too_small(host, gpus, count):
                return context, count, host, gpus
        raise InputError(self._refusal(*tries[-1]))

    def place(self, n_ctx: int, count: int) -> tuple[Use, tuple[Use, ...]]:
        """Host and GPUs with `count` layers on the latter, whether they fit or not."""
        host = self._host_use(n_ctx, count)
        if not self.gpus or not count:
            return host, self.gpus
        room = tuple(
            replace(gpu, usable=min(gpu.usable, max(0, host.usable - host.needed)))
            if shared
            else gpu
            for gpu, shared in zip(self.gpus, self._shares_host, strict=True)
        )
        if self._shares or len(room) == 1:
            counts = _by_shares(self._shares or [1.0], count)
        else:
            counts = self._fill(room, n_ctx, count)
        first = self._model.n_blocks + 1 - count
        starts = accumulate(counts, initial=first)
        return host, tuple(
            self._gpu_use(gpu, n_ctx, range(start, start + n), first > 0)
            for gpu, start, n in zip(room, starts, counts, strict=False)
        )

    def mapped(self, count: int) -> int:
        """Weights that the host reads straight from the file, in memory that can be taken back."""
        model, blocks = self._model, self._host_blocks(count)
        weights = model.block_weights(blocks) - model.packed_weights(blocks)
        return weights + model.input_weights + (0 if count else model.head_weights)

    def _host_blocks(self, count: int) -> range:
        return range(min(self._model.n_blocks, self._model.n_blocks + 1 - count))

    def _host_use(self, n_ctx: int, count: int) -> Use:
        model, blocks = self._model, self._host_blocks(count)
        compute = model.compute_blocks(n_ctx) if blocks else 0
        if not count:
            compute = max(compute, model.compute_head(n_ctx))
        return replace(
            self._host,
            weights=model.packed_weights(blocks),
            kv=model.kv(n_ctx, blocks),
            drafter=0 if count else model.drafter(n_ctx),
            compute=compute + model.host_buffers(n_ctx, self._copies),
        )

    def _gpu_use(self, gpu: Use, n_ctx: int, layers: range, partial: bool) -> Use:
        """`gpu` with these layers; number `n_blocks` is the output layer, the drafter's place."""
        if not layers:
            return gpu
        model = self._model
        blocks = range(layers.start, min(layers.stop, model.n_blocks))
        head = layers.stop > model.n_blocks
        compute = model.compute_blocks(n_ctx, self._copies)
        if head:
            compute = max(compute, model.compute_head(n_ctx))
        if partial:  # long batches are computed on the GPU, with weights copied there one by one
            compute += model.largest_block_tensor
        return replace(
            gpu,
            layers=len(layers),
            weights=model.block_weights(blocks)
            + (model.head_weights + model.head_copy if head else 0),
            kv=model.kv(n_ctx, blocks),
            drafter=model.drafter(n_ctx) if head else 0,
            compute=compute,
        )

    def _fill(self, room: tuple[Use, ...], n_ctx: int, count: int) -> list[int]:
        """Layers for each of several GPUs: an equal share of each, as nearly as layers allow."""
        best = self._packed(room, n_ctx, count, 1.0)
        if best is None:
            return _by_shares([gpu.usable + 1.0 for gpu in room], count)
        low, high = 0.0, 1.0
        for _ in range(8):
            middle = (low + high) / 2
            even = self._packed(room, n_ctx, count, middle)
            low, high = (middle, high) if even is None else (low, middle)
            best = even or best
        return best

    def _packed(
        self, room: tuple[Use, ...], n_ctx: int, count: int, share: float
    ) -> list[int] | None:
        """Layers in order, each GPU filled up to `share` of its room; None if some are left."""
        end = self._model.n_blocks + 1
        first = start = end - count
        counts = []
        for gpu in room:
            n = 0
            while start + n < end:
                use = self._gpu_use(gpu, n_ctx, range(start, start + n + 1), first > 0)
                if use.needed > gpu.usable * share:
                    break
                n += 1
            counts.append(n)
            start += n
        return counts if start == end else None

    def _too_small(self, host: Use, gpus: tuple[Use, ...], count: int) -> list[str]:
        """What does not fit, in words."""
        faults = [str(use) for use in gpus if use.layers and use.needed > use.usable]
        mapped, total = size_text(self.mapped(count)), size_text(host.total)
        if host.needed > host.usable:
            faults.append(str(host))
        elif host.total and host.needed + self.mapped(count) > host.total:
            faults.append(f"{host} and maps weights of {mapped}, more than the machine's {total}")
        return faults

    def _refusal(self, n_ctx: int, count: int) -> str:
        host, gpus = self.place(n_ctx, count)
        faults = "; ".join(self._too_small(host, gpus, count))
        where = f" and n_gpu_layers {count}" if self.gpus else ""
        lower = "n_ctx or n_gpu_layers" if count else "n_ctx"
        return (
            f"the models do not fit with n_ctx {n_ctx}{where}: {faults}; lower {lower}, take a "
            "smaller kv_type or quantisation, or free memory"
        )


def _gpus(devices: Sequence[Device]) -> list[Device]:
    """The devices that llama.cpp would use: each GPU once, integrated ones if there is no other."""
    found: dict[str, Device] = {}
    for device in devices:
        if device.type == "gpu":
            found.setdefault(device.id or f"{device.name} {len(found)}", device)
    remote = [device for device in found.values() if device.name.startswith("RPC")]
    local = [device for device in found.values() if device not in remote]
    return remote + (local or [device for device in devices if device.type == "igpu"])


def _by_shares(shares: list[float], count: int) -> list[int]:
    """How many of `count` layers llama.cpp gives to each GPU for a tensor_split of `shares`."""
    ends = [end / sum(shares) for end in accumulate(shares)]
    counts = [0] * len(shares)
    for layer in range(count):
        counts[next(i for i, end in enumerate(ends) if end > layer / count)] += 1
    return counts


def _split(counts: list[int]) -> tuple[float, ...] | None:
    """A tensor_split by which llama.cpp gives each GPU these layers; None for fewer than two.

    Its ends lie half a layer before those of `counts`, clear of any rounding.
    """
    if len(counts) < 2 or not any(counts):
        return None
    ends = [max(0.0, end - 0.5) for end in accumulate(counts)]
    return tuple(end - start for start, end in zip([0.0, *ends], ends, strict=False))


def _contexts(trained: int, on_gpu: bool) -> list[int]:
    contexts = [min(trained, DEFAULT_CONTEXT if on_gpu else DEFAULT_CONTEXT_CPU)]
    while contexts[-1] >= 2 * LEAST_CONTEXT:
        contexts.append(contexts[-1] // 2)
    return contexts


def _check_whole(name: str, value: Any, least: int, most: int | None) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected a whole number")
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise InputError(f"{name} is {value}, expected at least {least}{upper}")


def _check_kv_type(target: GgufFile, kv_type: str, flash_attn: bool) -> None:
    if kv_type not in KV_TYPES:
        raise InputError(f"kv_type is {kv_type!r}, expected one of {', '.join(KV_TYPES)}")
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kv_type.upper()]][0]
    if block > 1 and not flash_attn:
        raise InputError(f"kv_type {kv_type} needs flash attention; leave it on, or use f16")
    for name in ("key_length", "value_length"):
        length = target.get(f"{target.architecture}.attention.{name}") or block
        if length % block:
            raise InputError(
                f"kv_type {kv_type} needs an attention.{name} that is a multiple of {block}, and "
                f"the target's is {length}; use f16"
            )
