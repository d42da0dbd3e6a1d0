"""The layers on each GPU and on the host, as llama.cpp would place them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from dflash_local.errors import InputError
from dflash_local.fit.footprint import Footprint, Use, gpu_use, host_use, size_text
from dflash_local.fit.options import MAX_OUTPUT_ROWS, MAX_ROWS_AT_HOME, LoadOptions

if TYPE_CHECKING:
    from dflash_local.llama.runtime import Device

SMALL_CONTEXT = 4096
"""Tokens. A longer context is not worth leaving layers on the CPU, which slows down every token."""

# Contexts if none is given. A CPU needs minutes to read a longer prompt.
DEFAULT_CONTEXT, DEFAULT_CONTEXT_CPU, LEAST_CONTEXT = 32768, 8192, 2048

_PIPELINE_COPIES = 4  # GGML_SCHED_MAX_COPIES, in force with several GPUs


class Choice(NamedTuple):
    """A context, the layers on GPUs, and the layers, the first ones, whose experts are in RAM."""

    n_ctx: int
    n_gpu_layers: int
    n_cpu_moe: int = 0


class Devices:
    """The host and the GPUs, in llama.cpp's order, as places for one model's layers."""

    def __init__(self, model: Footprint, devices: Sequence[Device], options: LoadOptions) -> None:
        gpus = usable_gpus(devices)
        if options.split_mode == "none":
            gpus = gpus[options.main_gpu : options.main_gpu + 1]
        shares = [float(share) for share in options.tensor_split or ()]
        if any(not 0 <= share < float("inf") for share in shares) or (
            gpus and options.split_mode != "none" and len(shares) > len(gpus)
        ):
            raise InputError(
                f"tensor_split is {shares}, expected at most {len(gpus)} finite shares, one for "
                "each GPU, none negative"
            )
        self.model = model
        self._shares = shares + [0.0] * (len(gpus) - len(shares)) if any(shares) else []
        cpu = next(device for device in devices if device.type == "cpu")
        self._host = host_use(cpu.name, cpu.free, cpu.total)
        # llama.cpp treats a GPU that reports no memory as one that uses the host's.
        self._shares_host = [gpu.shares_host or not gpu.total for gpu in gpus]
        self.gpus = tuple(
            replace(gpu_use(gpu.name, own.free, own.total), weights=model.elsewhere[gpu.name])
            for gpu in gpus
            for own in [gpu if gpu.total else cpu]
        )
        known = [cpu.name, *(gpu.name for gpu in gpus if options.n_gpu_layers != 0)]
        for name in options.override_tensor.values():
            if name not in known:
                raise InputError(
                    f"override_tensor names the device {name!r}; expected one of {', '.join(known)}"
                )
        remote = [gpu.is_remote for gpu in gpus]
        self._head_on_host = (bool(remote) and remote[-1]) or model.head_device == cpu.name
        self._head_on_last = any(remote) and not self._head_on_host
        # Whole layers here cost no waits for the network; experts do, once for each layer.
        self._may_move_experts = not any(remote) and not all(self._shares_host)
        self._may_be_wide = model.is_mixture and not options.exact
        self._is_mapped = options.load_mode in ("auto", "mmap")
        self._copies = _PIPELINE_COPIES if len(self.gpus) > 1 and not any(remote) else 1

    @property
    def most(self) -> int:
        """The most layers that could be on GPUs."""
        return self.model.n_blocks + 1 if self.gpus else 0

    def choose(self, options: LoadOptions) -> Choice:
        """The first choice that fits. Raises InputError.

        Layers on the CPU slow down every token, and a long context is not worth that. So only small
        contexts are tried with fewer than all layers on GPUs. Before that, of a mixture just so
        many layers' experts go to RAM as are needed. There each token reads few of them, and a long
        context takes little beside them.
        """
        asked = options.n_gpu_layers
        layers = list(range(self.most, -1, -1))
        if asked is not None:
            layers = [self.most if asked < 0 else min(asked, self.most)]
        contexts = _contexts(self.model.trained, on_gpu=layers[0] > 0)
        small = [context for context in contexts if context <= SMALL_CONTEXT] or contexts
        if options.n_ctx:
            contexts = small = [options.n_ctx]
        n_cpu_moe = self.model.n_blocks if options.cpu_moe else options.n_cpu_moe
        if self.model.elsewhere.keys() - {self._host.name}:  # llama.cpp has that GPU with layers
            layers = [count for count in layers if count]
        moved, n_blocks = n_cpu_moe or 0, self.model.n_blocks
        tries = [Choice(c, layers[0], moved) for c in contexts if c >= small[0]]
        may_move = self._may_move_experts and n_cpu_moe is None and self.gpus and layers[0]
        if may_move and self.model.all.experts:
            tries += [Choice(c, layers[0], n) for c in contexts for n in range(1, n_blocks + 1)]
            moved = n_blocks
        tries += [Choice(c, count, moved) for c in small for count in layers]
        for choice in tries:
            if not self._too_small(choice):
                return choice
        raise InputError(self._refusal(tries[-1]))

    def place(self, choice: Choice) -> tuple[Use, tuple[Use, ...]]:
        """Host and GPUs with these layers and experts, whether they fit or not."""
        host, count = self._host_use(choice), choice.n_gpu_layers
        if not self.gpus or not count:
            return host, self.gpus
        left = max(0, host.usable - host.needed)
        room = tuple(
            replace(gpu, usable=min(gpu.usable, left)) if shared else gpu
            for gpu, shared in zip(self.gpus, self._shares_host, strict=True)
        )
        if self._shares or len(room) == 1:
            counts = _by_shares(self._shares or [1.0], count)
        else:
            counts = self._fill(room, choice)
        starts = accumulate(counts, initial=self._first(choice))
        return host, tuple(
            self._gpu_use(gpu, range(start, start + n), choice)
            for gpu, start, n in zip(room, starts, counts, strict=False)
        )

    def most_rows(self, choice: Choice) -> int:
        """The most rows of a sequence with logits: more where experts are in RAM beside GPUs."""
        named = self.model.elsewhere[self._host.name]
        in_ram = self._host_blocks(choice) or choice.n_cpu_moe or named
        is_wide = choice.n_gpu_layers and in_ram and self._may_be_wide
        return MAX_ROWS_AT_HOME if is_wide else MAX_OUTPUT_ROWS

    def experts(self, choice: Choice) -> range:
        """The layers on GPUs whose experts are in RAM."""
        first = self._host_blocks(choice).stop
        return range(first, max(first, min(choice.n_cpu_moe, self.model.n_blocks)))

    def mapped(self, choice: Choice) -> int:
        """Weights that the host uses in the mapped file. The system can free that memory."""
        return self._unpacked(choice) if self._is_mapped else 0

    def _unpacked(self, choice: Choice) -> int:
        """Weights on the host that the CPU does not pack."""
        model, head = self.model, self._has_head(choice)
        blocks = model.blocks(self._host_blocks(choice))
        experts = model.blocks(self.experts(choice))
        weights = blocks.weights - blocks.packed + experts.experts - experts.packed_experts
        weights += model.elsewhere[self._host.name] - model.packed_elsewhere[self._host.name]
        return weights + model.input_weights + (model.head_weights if head else 0)

    def _has_head(self, choice: Choice) -> bool:
        """Whether the host computes the logits. It never leaves them to another machine."""
        return not choice.n_gpu_layers or self._head_on_host

    def _first(self, choice: Choice) -> int:
        """The first layer on a GPU. Number `n_blocks` is the output layer, beside the drafter."""
        return self.model.n_blocks + 1 - choice.n_gpu_layers

    def _host_blocks(self, choice: Choice) -> range:
        return range(min(self.model.n_blocks, self._first(choice)))

    def _host_use(self, choice: Choice) -> Use:
        model, n_ctx = self.model, choice.n_ctx
        blocks, experts = self._host_blocks(choice), self.experts(choice)
        named = model.packed_elsewhere[self._host.name]
        compute = model.compute_blocks(n_ctx) if blocks or experts or named else 0
        has_head = self._has_head(choice)
        if has_head:
            compute = max(compute, model.compute_head(n_ctx, self.most_rows(choice)))
        weights = model.blocks(blocks).packed + model.blocks(experts).packed_experts + named
        return replace(
            self._host,
            weights=weights + (0 if self._is_mapped else self._unpacked(choice)),
            kv=model.kv(n_ctx, blocks) + (0 if choice.n_gpu_layers else model.spare_states),
            drafter=model.drafter(n_ctx) if has_head else 0,
            compute=compute + model.replayed(blocks) + model.host_buffers(n_ctx, self._copies),
        )

    def _gpu_use(self, gpu: Use, layers: range, choice: Choice) -> Use:
        """`gpu` with these of the chosen layers."""
        if not layers:
            return gpu
        model, n_ctx = self.model, choice.n_ctx
        blocks = range(layers.start, min(layers.stop, model.n_blocks))
        head = layers.stop > model.n_blocks and not self._head_on_host
        compute = model.compute_blocks(n_ctx, self._copies)
        if head:
            compute = max(compute, model.compute_head(n_ctx, self.most_rows(choice)))
        # Long batches are computed on the GPU, with weights copied there one by one.
        if self._first(choice) or choice.n_cpu_moe or model.elsewhere:
            compute += model.largest_block_tensor
        in_ram = range(blocks.start, min(blocks.stop, max(blocks.start, choice.n_cpu_moe)))
        weights = gpu.weights + model.blocks(blocks).weights - model.blocks(in_ram).experts
        return replace(
            gpu,
            layers=len(layers),
            weights=weights + (model.head_weights + model.head_copy if head else 0),
            kv=model.kv(n_ctx, blocks),
            drafter=model.drafter(n_ctx) + model.looked_up if head else 0,
            compute=compute + model.replayed(blocks),
        )

    def _fill(self, room: tuple[Use, ...], choice: Choice) -> list[int]:
        """Layers for each of several GPUs, so that all are filled to about the same share."""
        best = self._packed(room, choice, 1.0)
        if best is None:
            return _by_shares([gpu.usable + 1.0 for gpu in room], choice.n_gpu_layers)
        low, high = 0.0, 1.0
        for _ in range(8):
            middle = (low + high) / 2
            even = self._packed(room, choice, middle)
            low, high = (middle, high) if even is None else (low, middle)
            best = even or best
        return best

    def _packed(self, room: tuple[Use, ...], choice: Choice, share: float) -> list[int] | None:
        """Layers for the GPUs in order, each filled up to `share`; None if layers remain."""
        start, end, counts = self._first(choice), self.model.n_blocks + 1, []
        for gpu in room:
            n = 0
            most = end - 1 if self._head_on_last and gpu is not room[-1] else end
            while start + n < most:
                use = self._gpu_use(gpu, range(start, start + n + 1), choice)
                if use.needed > gpu.usable * share:
                    break
                n += 1
            counts.append(n)
            start += n
        return counts if start == end else None

    def _too_small(self, choice: Choice) -> list[str]:
        """The parts that do not fit, in words."""
        host, gpus = self.place(choice)
        faults = [str(use) for use in gpus if use.needed > use.usable]
        n_mapped = self.mapped(choice)
        mapped, total = size_text(n_mapped), size_text(host.total)
        if host.needed > host.usable:
            faults.append(str(host))
        elif host.total and host.needed + n_mapped > host.total:
            faults.append(f"{host} and maps weights of {mapped}, more than the machine's {total}")
        return faults

    def _refusal(self, choice: Choice) -> str:
        count, faults = choice.n_gpu_layers, "; ".join(self._too_small(choice))
        where = f" and n_gpu_layers {count}" if self.gpus else ""
        lower = "n_ctx or n_gpu_layers" if count else "n_ctx"
        return (
            f"the models do not fit with n_ctx {choice.n_ctx}{where}: {faults}; lower {lower}, "
            "take a smaller kv_type or quantisation, or free memory"
        )


def named_devices(devices: Sequence[Device], names: Sequence[str]) -> list[Device]:
    """The workers, the GPUs that are named, in the order of the names, and devices that are no
    GPUs; without names all. "none" names no GPU. Raises InputError."""
    own = {each.name: each for each in devices if "gpu" in each.type and not each.is_remote}
    if isinstance(names, str) or any(name not in {*own, "none"} for name in names):
        if not own:
            raise InputError(
                f"device is {names!r}, but no GPU is seen here (see --list-devices); leave it out, "
                "or give none"
            )
        listed = ", ".join((*own, "none"))
        raise InputError(f"device is {names!r}; expected names of a list, of {listed}")
    if not names:
        return list(devices)
    others = [each for each in devices if each not in own.values()]
    return [*others, *(own[name] for name in dict.fromkeys(names) if name in own)]


def usable_gpus(devices: Sequence[Device]) -> list[Device]:
    """The GPUs that llama.cpp would use, each one once. Integrated ones are the last choice."""
    found: dict[str, Device] = {}
    for device in devices:
        if device.type == "gpu":
            found.setdefault(device.id or f"{device.name} {len(found)}", device)
    remote = [device for device in found.values() if device.is_remote]
    local = [device for device in found.values() if device not in remote]
    return remote + (local or [device for device in devices if device.type == "igpu"])


def _by_shares(shares: list[float], count: int) -> list[int]:
    """The number of `count` layers that llama.cpp gives each GPU for a tensor_split of `shares`."""
    ends = [end / sum(shares) for end in accumulate(shares)]
    counts = [0] * len(shares)
    for layer in range(count):
        counts[next(i for i, end in enumerate(ends) if end > layer / count)] += 1
    return counts


def _contexts(trained: int, on_gpu: bool) -> list[int]:
    """Contexts to try for a model that was trained on so many tokens, the longest first."""
    contexts = [min(trained, DEFAULT_CONTEXT if on_gpu else DEFAULT_CONTEXT_CPU)]
    while contexts[-1] >= 2 * LEAST_CONTEXT:
        contexts.append(contexts[-1] // 2)
    return contexts


def tensor_split_of(counts: list[int]) -> tuple[float, ...] | None:
    """A tensor_split that makes llama.cpp give each GPU these layers; None below two GPUs.

    Its ends are half a layer before those of `counts`, so that rounding does not matter.
    """
    if len(counts) < 2 or not any(counts):
        return None
    ends = [max(0.0, end - 0.5) for end in accumulate(counts)]
    return tuple(end - start for start, end in zip([0.0, *ends], ends, strict=False))
