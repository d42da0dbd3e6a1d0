"""The memory that a pair of models takes, in bytes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dflash_local.fit.architectures import CELLS, WayBack
from dflash_local.fit.options import (
    CHECKPOINTS,
    MAX_OUTPUT_ROWS,
    SPARE_IDS,
    STORED_ROWS,
    LoadOptions,
    scaled_files,
)
from dflash_local.fit.overrides import EXPERTS, device_of
from dflash_local.gguf.adapter import open_adapter
from dflash_local.gguf.drafter_spec import (
    AnySpec,
    AssistantSpec,
    HeadLayerSpec,
    HeadsSpec,
    ModelSpec,
)
from dflash_local.gguf.drafter_tensors import TOKEN_TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_local.gguf.file import GgufFile

_MIB, _GIB = 1 << 20, 1 << 30
_HOST_MARGIN, _GPU_LEAST, _GPU_MOST = 256 * _MIB, 512 * _MIB, 1024 * _MIB
_CELLS = 256  # llama.cpp rounds a context up to this, and the draft graph its KV length
_OUTPUT_BYTES = 16  # llama.cpp's buffer per token and row: two kinds of logits, chances, ids
_MEASURED_ROWS = 16  # of the widest pass that measures how exact a machine is
_ID_BYTES = 48  # per token, in the list that llama.cpp keeps for each sequence id
_KEPT_GRAPHS = 8  # of a drafter, each with inputs and results of its own
_RESULT_ROW = 8 << 10  # bytes that the host reads for a position of a block, at most
_SPARE_ROWS = 64  # rows that the draft graph's cache keeps before a window
_BLOCK_TENSOR = re.compile(r"^blk\.(\d+)\.")
_EXPERTS = re.compile(EXPERTS)
_INPUT_TENSORS = ("token_", "position_embd", "per_layer_token_embd")  # never put on a GPU
_MAPPED_TYPES = ("F32", "F16", "BF16")  # used directly in the mapped file; the CPU re-packs others


def has_mxfp4_experts(file: GgufFile) -> bool:
    """Whether the file has experts for which there are kernels of our own on CPUs."""
    return any(t.type_name == "MXFP4" and _EXPERTS.search(t.name) for t in file.tensors.values())


@dataclass(frozen=True)
class Use:
    """The plan's use of one device, in bytes. `usable` is the free memory less a margin."""

    name: str
    free: int
    total: int
    usable: int
    layers: int = 0
    """Layers on this device; the output layer counts as one."""
    weights: int = 0
    kv: int = 0
    drafter: int = 0
    compute: int = 0

    @property
    def needed(self) -> int:
        return self.weights + self.kv + self.drafter + self.compute

    @property
    def brief(self) -> str:
        return f"{self.name} {size_text(self.needed)} of {size_text(self.free)} free"

    def __str__(self) -> str:
        sizes = self.weights, self.kv, self.drafter, self.compute
        parts = zip(("weights", "KV cache", "drafter", "compute"), sizes, strict=True)
        listed = " + ".join(f"{name} {size_text(n)}" for name, n in parts if n)
        usable, free = size_text(self.usable), size_text(self.free)
        return f"{self.name} needs {size_text(self.needed)} ({listed}), has {usable} of {free} free"


def gpu_use(name: str, free: int, total: int) -> Use:
    """A GPU without any layers. A twentieth of it, within limits, is left for scratch memory of
    kernels."""
    return Use(name, free, total, max(0, free - min(max(_GPU_LEAST, total // 20), _GPU_MOST)))


def host_use(name: str, free: int, total: int) -> Use:
    """The host without any layers. A total of 0 means that the system does not tell."""
    return Use(name, free, total, max(0, free - _HOST_MARGIN) if total else 1 << 62)


def size_text(n: int) -> str:
    return f"{n / _GIB:.1f} GiB" if n >= _GIB else f"{n / _MIB:.0f} MiB"


def cells(n_ctx: int) -> int:
    """Rows of a KV cache that holds `n_ctx` tokens."""
    return -(-n_ctx // _CELLS) * _CELLS


class Blocks(NamedTuple):
    """Bytes of layers that repeat."""

    weights: int = 0
    packed: int = 0
    """Weights that a CPU holds a second time, in its own layout."""
    experts: int = 0
    """The part of `weights` that are experts."""
    packed_experts: int = 0
    cell: int = 0
    """Keys and values of a cell."""
    state: int = 0
    """The recurrent state of a sequence."""
    consumed: int = 0
    """Of a row, by recurrent layers: replay keeps it."""

    def plus(self, other: Blocks, times: int = 1) -> Blocks:
        return Blocks(*(a + times * b for a, b in zip(self, other, strict=True)))


class Footprint:
    """The memory of a target and, if there is one, a drafter, by layer, from the checked files.

    Weights and caches are exact. Compute buffers are estimated by a formula. It gave what llama.cpp
    reserved for dense, MoE and sliding-window models with flash attention, 512 to 4096 wide.
    """

    def __init__(
        self,
        target: GgufFile,
        drafter: GgufFile | None,
        spec: AnySpec | None,
        options: LoadOptions,
        n_branches: int = 1,
        way_back: WayBack = CELLS,
    ) -> None:
        self._way_back = way_back
        self._n_states = options.n_seq * (1 + way_back.by("snapshots"))
        self._draft_window, self._n_branches = options.draft_window or 0, n_branches
        self._target, self._arch = target, target.architecture
        adapters = scaled_files("lora", options.lora)
        self._files = target, *(open_adapter(path, target) for path, _ in adapters)
        self._n_seq, self._n_batch = options.n_seq, options.n_batch
        self._flash_attn = options.flash_attn
        self.n_blocks = target.require(f"{self._arch}.block_count", int)
        self.trained = target.require(f"{self._arch}.context_length", int)
        self._n_embd = target.require(f"{self._arch}.embedding_length", int)
        self._n_vocab = target.n_vocab or 0
        width = MAX_OUTPUT_ROWS if n_branches > 1 else spec.block_size if spec else 1
        self._n_verified = min(self._n_batch, max(self._n_seq * width, _MEASURED_ROWS))
        self.is_mixture = bool(self._key("expert_count"))
        self._masks = 2 if self._key("attention.sliding_window") else 1
        self._key_type, self._value_type = (
            GGMLQuantizationType[name.upper()] for name in options.kv_types
        )
        layers = [
            Blocks(cell=cell, state=state, consumed=self._row_of_net(i))
            for i in range(self.n_blocks)
            for cell, state in [self._cache_row(i)]
        ]
        self._read_weights(options.override_tensor, layers)
        self._sums = list(accumulate(layers, Blocks.plus, initial=Blocks()))
        self.all = self.blocks(range(self.n_blocks))
        # A pass makes the snapshots of a layer before it stores them.
        has_snapshots = way_back.by("snapshots") > 0
        self._new_states = max(each.state for each in layers) * self._n_states * has_snapshots
        self._read_shape()
        self.taps = len(spec.target_layers) if spec else 0
        self._own: Footprint | None = None
        """Of a drafter that is a language model, or an assistant, in a context of its own."""
        self._has_heads = isinstance(spec, HeadsSpec)
        if drafter is not None and isinstance(spec, (ModelSpec, AssistantSpec)):
            doubled = isinstance(spec, ModelSpec) and spec.is_recurrent
            own = options.for_drafter(is_recurrent=doubled)
            self._own = Footprint(drafter, None, None, own)
        self._read_drafter(drafter, spec)

    def _read_weights(self, overrides: Mapping[str, str], layers: list[Blocks]) -> None:
        """The weights of all files, of those in `layers` added to them."""
        self.largest_block_tensor = self.input_weights = self.head_weights = 0
        self.elsewhere: Counter[str] = Counter()
        """Bytes of the tensors for which the user names a device, by device."""
        self.packed_elsewhere: Counter[str] = Counter()
        """The number of these with types that the CPU packs."""
        for tensor in chain.from_iterable(file.tensors.values() for file in self._files):
            match = _BLOCK_TENSOR.match(tensor.name)
            n, n_packed = tensor.n_bytes, tensor.n_bytes * (tensor.type_name not in _MAPPED_TYPES)
            if (device := device_of(tensor.name, overrides)) is not None:
                self.elsewhere[device] += n
                self.packed_elsewhere[device] += n_packed
                self.largest_block_tensor = max(self.largest_block_tensor, n)
            elif match and int(match[1]) < self.n_blocks:
                experts = (n, n_packed) if _EXPERTS.search(tensor.name) else ()
                layers[int(match[1])] = layers[int(match[1])].plus(Blocks(n, n_packed, *experts))
                self.largest_block_tensor = max(self.largest_block_tensor, n)
            elif tensor.name.startswith(_INPUT_TENSORS):
                self.input_weights += n
            else:
                self.head_weights += n
        self.weights = sum(each.weights for each in layers) + self.elsewhere.total()
        self.weights += self.input_weights + self.head_weights
        self.head_device = device_of("output.weight", overrides)
        """The device that the user names for the output head."""
        # llama.cpp copies the embeddings when a tied head goes to a GPU.
        tied = "output.weight" not in self._target.tensors
        embeddings = self._target.tensors.get("token_embd.weight")
        self.head_copy = embeddings.n_bytes if tied and embeddings else 0

    def _read_drafter(self, drafter: GgufFile | None, spec: AnySpec | None) -> None:
        self.drafter_weights = self._drafter_row = self._drafter_block = 0
        self._drafter_compute = self._drafter_on_host = self._drafter_masks = 0
        self.looked_up = 0
        """A copy of the embeddings for heads, if these are on a GPU."""
        if drafter is None or spec is None:
            return
        self._drafter_block = spec.block_size
        if isinstance(spec, HeadsSpec) and isinstance(spec.layer, HeadLayerSpec):
            self._drafter_row = 4 * spec.layer.n_head_kv * spec.layer.head_dim
            embeddings = drafter.tensors.get("token_embd.weight")
            self.looked_up = embeddings.n_bytes if embeddings and not self.head_copy else 0
        if self._own:
            self.drafter_weights = self._own.weights + self._own.head_copy
        if isinstance(spec, (ModelSpec, HeadsSpec, AssistantSpec)):
            return
        width = spec.n_head_kv * spec.head_dim
        self.drafter_weights = sum(tensor.n_bytes for tensor in drafter.tensors.values())
        tables = (drafter.tensors.get(name) for name in TOKEN_TABLES)
        self._drafter_on_host = sum(table.n_bytes for table in tables if table)
        self._drafter_row = spec.n_layer * 2 * width * 2
        self._drafter_masks = 2 if spec.sliding_window else 1
        n_ff = drafter.largest("feed_forward_length")
        row = 3 * spec.n_embd + spec.n_head * spec.head_dim
        inject = self._n_batch * (self.taps * self._n_embd + row + 2 * width)
        if spec.selector is not None:  # the kernels of a part's two convolutions, and their sums
            row += (4 * spec.selector.kernel_size + 4) * spec.n_embd
        # A Markov head also keeps the logits by themselves, those of a guess, and what it adds.
        n_logits = 5 if spec.markov_rank else 2
        block = self._n_seq * spec.block_size * (n_logits * self._n_vocab + 3 * n_ff + row)
        self._drafter_compute = 4 * (inject + block)

    def _key(self, name: str) -> Any:
        return self._target.get(f"{self._arch}.{name}")

    def _width(self, layer: int, tensor: str) -> int:
        found = self._target.tensors.get(f"blk.{layer}.{tensor}.weight")
        return found.shape[1] if found and len(found.shape) > 1 else 0

    def _cache_row(self, layer: int) -> tuple[int, int]:
        """(bytes per cell, bytes per sequence) of a layer: its KV cache, its recurrent state."""
        names = self._target.tensors
        prefix = f"blk.{layer}."
        recurrent = any(f"{prefix}ssm_{part}" in names for part in ("a", "conv1d.weight"))
        state = 0
        if f"{prefix}shortconv.conv.weight" in names:
            state = 4 * ((self._key("shortconv.l_cache") or 1) - 1) * self._n_embd
        if recurrent:
            inner, size = self._key("ssm.inner_size") or 0, self._key("ssm.state_size") or 0
            groups, kernel = self._key("ssm.group_count") or 0, self._key("ssm.conv_kernel") or 1
            state = 4 * ((kernel - 1) * (inner + 2 * groups * size) + inner * size)
        if recurrent and self._kda_width:
            width, kernel = self._kda_width, self._key("ssm.conv_kernel") or 4
            return 0, 4 * width * (3 * (kernel - 1) + self._key("kda.head_dim"))
        if layer >= self.n_blocks - (self._key("attention.shared_kv_layers") or 0):
            return 0, state
        if self._key("attention.key_length_mla"):
            rank, rope = self._key("attention.kv_lora_rank"), self._key("rope.dimension_count")
            return _stored((rank or 0) + (rope or 0), self._key_type), state
        key = self._width(layer, "attn_k")
        value = self._width(layer, "attn_v") or key
        if not key and f"{prefix}attn_qkv.weight" in names and not recurrent:
            heads = _at(self._key("attention.head_count"), layer)
            head = self._n_embd // max(1, heads)
            kv_heads = _at(self._key("attention.head_count_kv"), layer) or heads
            key = kv_heads * (self._key("attention.key_length") or head)
            value = kv_heads * (self._key("attention.value_length") or head)
        return _stored(key, self._key_type) + _stored(value, self._value_type), state

    @property
    def _kda_width(self) -> int:
        """Queries, keys or values of all heads of Kimi's delta attention; 0 without it."""
        return (self._key("kda.head_dim") or 0) * _at(self._key("attention.head_count"), 0)

    def _row_of_net(self, layer: int) -> int:
        """Bytes of a row that replay keeps of a gated delta net: the inputs and the results of its
        convolution, normed keys, and a gate and a beta of each head. Kimi's has a convolution for
        each of queries, keys and values, and as wide a gate. A short convolution keeps inputs."""
        if f"blk.{layer}.shortconv.conv.weight" in self._target.tensors:
            return 4 * self._n_embd
        if f"blk.{layer}.ssm_a" not in self._target.tensors:
            return 0
        if self._kda_width:
            return 4 * (6 * self._kda_width + _at(self._key("attention.head_count"), 0))
        inner, size = self._key("ssm.inner_size") or 0, self._key("ssm.state_size") or 0
        groups, n_heads = self._key("ssm.group_count") or 0, self._key("ssm.time_step_rank") or 0
        return 4 * (2 * (inner + 2 * groups * size) + groups * size + 2 * n_heads)

    def _read_shape(self) -> None:
        blocks = range(self.n_blocks)
        self._heads = max(self._target.largest("attention.head_count"), 1)
        head = self._key("attention.key_length") or self._n_embd // self._heads
        self._query = max((self._width(i, "attn_q") for i in blocks), default=0)
        self._query = self._query or self._heads * head
        self._keys = max((self._width(i, "attn_k") for i in blocks), default=0)
        self._experts = self._target.largest("expert_used_count")
        if self._experts:
            self._n_ff = self._experts * self._target.largest("expert_feed_forward_length")
        if not self._experts or not self._n_ff:
            self._n_ff = self._target.largest("feed_forward_length")

    def blocks(self, layers: range) -> Blocks:
        """The sums over some layers."""
        return self._sums[layers.stop].plus(self._sums[layers.start], -1)

    def kv(self, n_ctx: int, layers: range) -> int:
        """The target's cache and its states. Layers with a sliding window keep the whole context,
        too."""
        of = self.blocks(layers)
        return of.cell * cells(n_ctx) + self._n_states * of.state

    @property
    def spare_states(self) -> int:
        """Bytes of the further ids that keep the cells of several slots on a CPU in order."""
        keeps_order = self._n_seq > 1 and self._way_back.kind == "replay"
        return SPARE_IDS * self.all.state if keeps_order else 0

    @property
    def states(self) -> int:
        """Bytes of that for the recurrent states of all sequences, with their snapshots."""
        return self._n_states * self.all.state

    def drafter_kv(self, n_ctx: int) -> int:
        """The drafter's cache for all sequences, when the context is full: f16, or as the target's
        for a language model."""
        if self._own:
            return self._own.kv(self._own_ctx(n_ctx), range(self._own.n_blocks))
        return self._drafter_row * self._drafter_cells(n_ctx)

    def _own_ctx(self, n_ctx: int) -> int:
        return n_ctx + self._n_seq * self._drafter_block

    def _drafter_cells(self, n_ctx: int) -> int:
        """Cells of the drafter's cache for all sequences. A window limits them."""
        window = self._draft_window or n_ctx
        rows = min(window + _SPARE_ROWS, n_ctx)
        return cells(rows + self._drafter_block + 1) * self._n_seq

    def drafter(self, n_ctx: int) -> int:
        """The drafter with cache and graph. While a cache grows, the old one is still there, which
        may be nearly as large."""
        if self._own:
            own, n_own = self._own, self._own_ctx(n_ctx)
            compute = max(own.compute_blocks(n_own), own.compute_head(n_own))
            return self.drafter_weights + self.drafter_kv(n_ctx) + compute
        if self._has_heads:  # their weights are counted as those of the target's layers
            compute = max(self.compute_blocks(n_ctx), self.compute_head(n_ctx))
            return 2 * self.drafter_kv(n_ctx) + compute + self.tap_store
        compute = self._drafter_compute + self.kept_graphs(n_ctx) + self.tap_store
        return self.drafter_weights + 2 * self.drafter_kv(n_ctx) + compute

    @property
    def tap_store(self) -> int:
        """Bytes of the target's hidden states that wait for the drafter."""
        return 4 * self.taps * self._n_embd * (self._n_batch + STORED_ROWS * self._n_seq)

    def kept_graphs(self, n_ctx: int) -> int:
        """Masks and results of all draft graphs that are kept: on the drafter's device, and as much
        on the host."""
        if self._own or self._has_heads:
            return 0
        masks = 2 * self._drafter_masks * self._drafter_cells(n_ctx)
        return _KEPT_GRAPHS * self._drafter_block * (masks + _RESULT_ROW * self._n_seq)

    def compute_blocks(self, n_ctx: int, copies: int = 1) -> int:
        """The buffer of a graph of repeating layers. llama.cpp keeps `copies` of its inputs."""
        rows = self._rows(n_ctx)
        mask = self._masks * rows * cells(n_ctx) * copies
        width = 3 * self._n_ff + (3 + self._experts) * self._n_embd + self._query
        buffer = 4 * rows * width + 2 * mask
        if not self._flash_attn:
            scores = rows * cells(n_ctx) * self._heads
            width = 3 * self._n_embd + 2 * self._query + 4 * self._keys
            # Kernels hold the scores once more, in halves, outside of llama.cpp's buffer.
            buffer = max(buffer, 4 * (scores + mask + rows * width)) + 2 * scores
        # A tap must outlive its graph. That took up to two buffers of its size.
        return buffer + self._new_states + 8 * rows * self.taps * self._n_embd

    def replayed(self, layers: range) -> int:
        """Bytes that replay keeps of a pass, beside its buffer: the recurrent states before it, and
        all that its rows put into them."""
        if self._way_back.kind != "replay":
            return 0
        of = self.blocks(layers)
        return self._n_seq * (of.state + (1 + self._way_back.rows) * of.consumed)

    def compute_head(self, n_ctx: int, most_rows: int = MAX_OUTPUT_ROWS) -> int:
        """The buffer of the output layer: its inputs, and logits of `most_rows` of a sequence."""
        rows = self._rows(n_ctx)
        n_outputs = min(rows, most_rows * self._n_seq)
        return 4 * (n_outputs * self._n_vocab + 2 * rows * self._n_embd)

    def host_buffers(self, n_ctx: int, copies: int = 1) -> int:
        """Bytes that the host always holds: inputs, taps, the output of the widest verify pass,
        checkpoints of each recurrent state, the drafter's tables for the anchor, its graphs' part,
        and the list of tokens of each sequence id. After a wide tree, all ids of a sequence have
        all of its tokens."""
        rows = self._rows(n_ctx)
        inputs = 4 * rows * self._n_embd + 2 * self._masks * rows * cells(n_ctx) * copies
        taps = 4 * self._n_batch * self.taps * self._n_embd
        ids = _ID_BYTES * self._n_branches * cells(n_ctx)
        checkpoints = CHECKPOINTS * self._n_seq * self.all.state
        outputs = _OUTPUT_BYTES * self._n_verified * self._n_vocab
        drafter = self._drafter_on_host + self.kept_graphs(n_ctx)
        if self._own:
            drafter += self._own.host_buffers(self._own_ctx(n_ctx))
        return inputs + taps + checkpoints + ids + outputs + drafter

    def _rows(self, n_ctx: int) -> int:
        return min(self._n_batch, cells(n_ctx))


def _stored(n: int, kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return -(-n // block) * size


def _at(value: Any, layer: int) -> int:
    """The number of a layer, from a number for all layers or an array; 0 if it is missing."""
    if isinstance(value, list):
        return int(value[layer]) if layer < len(value) else 0
    return int(value or 0)
