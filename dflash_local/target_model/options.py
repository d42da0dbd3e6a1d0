"""Options of a target: its context, its devices, and the layers that are tapped."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gguf import GGMLQuantizationType

from dflash_local.errors import InputError
from dflash_local.fit.architectures import CELLS, WayBack
from dflash_local.fit.footprint import has_mxfp4_experts
from dflash_local.fit.options import (
    LOAD_MODES,
    MAX_IDS,
    MAX_OUTPUT_ROWS,
    ROPE_NUMBERS,
    ROPE_SCALINGS,
    SNAPSHOT_ROWS,
    ContextOptions,
)
from dflash_local.fit.overrides import experts_of
from dflash_local.fit.placement import named_devices, usable_gpus
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import native, runtime, workers
from dflash_local.llama.runtime import api

_SPLIT_MODES = {
    "none": api.LLAMA_SPLIT_MODE_NONE,
    "layer": api.LLAMA_SPLIT_MODE_LAYER,
    "row": api.LLAMA_SPLIT_MODE_LAYER,  # see `split_by_layers_because`
    "tensor": api.LLAMA_SPLIT_MODE_LAYER,
}
_ALL_LAYERS = 999
_NO_DEVICES = (ctypes.c_void_p * 1)(None)


def reads_in_place(file: GgufFile) -> bool:
    """Whether a file's experts are multiplied on CPUs where they are in it, by kernels of our own.
    llama.cpp would pack a copy for its kernels, which read it anew for each row. A plan counts them
    as packed: more memory than they take in a mapped file."""
    runtime.init()
    return bool(native.expert_kernels()) and has_mxfp4_experts(file)


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ContextOptions):
    """Options of a target; None leaves the choice to llama.cpp or the machine.

    `n_ctx` are cells of KV cache, shared by all `n_seq` sequences. `n_batch` is the most rows of
    one decode. A sequence may fork into `n_branches` while a draft tree is verified. Each branch
    takes one of llama.cpp's sequence ids. The experts of the first `n_cpu_moe` layers are in RAM.
    `tapped_layers` are the layers whose inputs are kept as features; they cannot be changed later.
    `way_back`: how a recurrent sequence takes rows back. `heads`: whether the layers that predict
    further tokens are loaded, too. `in_place`: see `reads_in_place`. `exact`: results do not depend
    on how busy the CPUs are, nor on other sequences, not even in their last bits.
    """

    n_ctx: int
    n_gpu_layers: int = 0
    n_cpu_moe: int = 0
    tapped_layers: tuple[int, ...] = ()
    n_branches: int = 1
    way_back: WayBack = CELLS
    heads: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        n_ids = self.n_seq * self.n_branches
        if not 1 <= n_ids <= MAX_IDS:
            raise InputError(
                f"{self.n_seq} sequences of {self.n_branches} branches; llama.cpp has "
                f"{MAX_IDS} ids for all of them"
            )
        if n_ids > self.n_batch:  # llama.cpp asserts it
            of_each = f" of {self.n_branches} branches" if self.n_branches > 1 else ""
            raise InputError(
                f"n_batch is {self.n_batch} with {self.n_seq} sequences{of_each}; "
                "give it at least one row for each"
            )
        n_snapshots = self.way_back.by("snapshots")
        if n_snapshots and self.n_batch < n_snapshots + SNAPSHOT_ROWS:
            raise InputError(
                f"n_batch is {self.n_batch} with {n_snapshots} snapshots; give it at least "
                f"{n_snapshots + SNAPSHOT_ROWS}"
            )

    @property
    def has_streams(self) -> bool:
        """Whether each sequence has an equal part of the cells for its own. There its cells lie as
        if it were alone, and so sums over them round as if it were."""
        return self.exact and self.n_seq > 1

    def model_params(self) -> Any:
        """`llama_model_params`. Raises InputError for a `tensor_split` over more devices than
        llama.cpp can take."""
        params = api.llama_model_default_params()
        params.n_gpu_layers = _ALL_LAYERS if self.n_gpu_layers < 0 else self.n_gpu_layers
        if self.override_kv:
            runtime.override_keys(params, self.override_kv)
        params.load_mtp = self.heads
        params.use_extra_bufts = not self.in_place
        params.load_mode = LOAD_MODES.index(self.load_mode) - 1
        overrides: list[tuple[str, int]] = []
        if self.n_gpu_layers == 0:
            # otherwise llama.cpp still puts the KV cache and large products on a GPU
            params.devices = ctypes.addressof(_NO_DEVICES)
        elif self.rpc:
            overrides += _use_workers(params, self.rpc, self.device)
        elif self.device:
            runtime.use_devices(params, map(runtime.device_pointer, self.device))
        for pattern, device in self.override_tensor.items():
            overrides.append((pattern, _device_pointer(device, self.rpc)))
        if self.n_cpu_moe:
            overrides.append((experts_of(self.n_cpu_moe), runtime.device_pointer(runtime.cpu())))
        if overrides:
            runtime.override_buffers(params, overrides)
        params.split_mode = _SPLIT_MODES[self.split_mode]
        params.main_gpu = self.main_gpu
        if self.tensor_split is not None:
            n_devices = api.llama_max_devices()
            if len(self.tensor_split) > n_devices:
                raise InputError(
                    f"tensor_split has {len(self.tensor_split)} parts; "
                    f"this llama.cpp splits over at most {n_devices} devices"
                )
            params.tensor_split = (ctypes.c_float * n_devices)(*self.tensor_split)
        return params

    def context_params(self, n_threads: int, n_verified: int = MAX_OUTPUT_ROWS) -> Any:
        """`llama_context_params` for this many threads, and `n_verified` rows of a sequence with
        logits at most."""
        params = api.llama_context_default_params()
        params.n_ctx = self.n_ctx
        params.n_batch = self.n_batch
        params.n_ubatch = self.n_batch
        params.n_seq_max = self.n_seq * self.n_branches
        params.n_rs_seq = self.way_back.by("snapshots")
        params.n_outputs_max = min(self.n_batch, n_verified * self.n_seq)
        params.n_outputs_max_per_seq = n_verified
        params.n_threads = n_threads
        params.n_threads_batch = n_threads
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if self.flash_attn
            else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k, params.type_v = (
            int(GGMLQuantizationType[name.upper()]) for name in self.kv_types
        )
        for name in ROPE_NUMBERS:
            if (value := getattr(self, name)) is not None:
                setattr(params, name, value)
        if self.rope_scale is not None:
            params.rope_freq_scale = 1 / self.rope_scale
        if self.rope_scaling is not None:
            params.rope_scaling_type = ROPE_SCALINGS.index(self.rope_scaling)
        params.kv_unified = not self.has_streams
        # A window that only keeps its last cells cannot be rolled back past them.
        params.swa_full = True
        params.no_perf = True
        return params


def _use_workers(params: Any, rpc: Sequence[str], names: Sequence[str]) -> list[tuple[str, int]]:
    """Let llama.cpp use the workers' devices before our own. The overrides that are returned keep
    the output head here, where the logits are read and the drafter lives: with an override,
    llama.cpp makes no pipeline either, which would take four times the memory to compute in."""
    own = usable_gpus(named_devices(runtime.devices(), names))
    handles = [*workers.remote_pointers(rpc), *(runtime.device_pointer(gpu.name) for gpu in own)]
    home = own[-1].name if own else runtime.cpu()
    # A tied model's head is a second copy of its embedding, which is on the host in any case.
    names = ["^output"] if own else ["^output", "^token_embd"]
    runtime.use_devices(params, handles)
    return [(name, runtime.device_pointer(home)) for name in names]


def _device_pointer(name: str, rpc: Sequence[str]) -> int:
    """ggml's handle of a device of this machine or of a worker. Raises InputError."""
    known = {device.name: runtime.device_pointer(device.name) for device in runtime.devices()}
    if rpc:
        remote = (device.name for device in workers.remote_devices(rpc))
        known |= dict(zip(remote, workers.remote_pointers(rpc), strict=True))
    if name not in known:
        raise InputError(
            f"override_tensor names the device {name!r}; expected one of {', '.join(known)}"
        )
    return known[name]
