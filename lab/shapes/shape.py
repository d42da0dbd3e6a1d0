"""The dimensions of real pairs, so that a machine can be measured before anything is downloaded.

Targets have the dimensions of their published configs. Drafters have 5 layers, blocks of 16 tokens
and 5 taps, but 8 layers for the mixtures of experts and blocks of 10 for Llama 3.1 (arXiv
2602.06036, section 5). Heads, rope base and context are those of the target, as in the published
checkpoints. Drafters for targets with recurrent layers have heads of their own; their sizes are
approximate, and the windows of some published ones are left out. DFlash 2 and DSpark drafters have
the layers and the block of the plain one, so that the costs of their heads can be compared. These
heads are as large as the published ones. The drafters published for LFM2.5 are of DSpark.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dflash_local.errors import InputError

Architecture = Literal[
    "qwen3", "qwen3moe", "qwen35", "qwen35moe", "qwen3next", "lfm2moe", "llama", "gpt-oss"
]

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_N_TAPS = 5


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each layer's feed-forward network, but for the first
    `n_dense` layers. `n_ff_shared`: the width of one more expert, which every token uses; 0 without
    it."""

    n: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    n_dense: int = 0


@dataclass(frozen=True)
class Heads:
    """Attention heads: of queries, of keys and values, and the values of each."""

    n: int
    n_kv: int
    dim: int


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets in place of attention, but for each layer whose number `interval` divides.

    The attention that is left has a gate, and rotates 64 of a head's values or, if it has fewer,
    a quarter of them. `joined`: one matrix gives decays and weights, as in Qwen3-Next.
    """

    n_key_heads: int
    n_value_heads: int
    head_dim: int = 128
    kernel: int = 4
    interval: int = 4
    joined: bool = False

    @property
    def n_keys(self) -> int:
        return self.n_key_heads * self.head_dim

    @property
    def n_values(self) -> int:
        return self.n_value_heads * self.head_dim

    @property
    def n_conv(self) -> int:
        """Columns of the convolution: queries, keys and values."""
        return 2 * self.n_keys + self.n_values

    def is_recurrent(self, layer: int) -> bool:
        return (layer + 1) % self.interval != 0


@dataclass(frozen=True)
class ShortConv:
    """Short convolutions over `kernel` tokens in place of attention, but for one layer of each
    `interval`, the third first."""

    kernel: int = 3
    interval: int = 4

    def is_recurrent(self, layer: int) -> bool:
        return layer % self.interval != 2


@dataclass(frozen=True)
class Selector:
    """DFlash 2's path selector, and the convolutions of its layers."""

    rank: int = 256
    top_k: int = 16
    kernel_size: int = 2
    group_size: int = 16


@dataclass(frozen=True)
class DrafterShape:
    """A drafter: layers like those of Qwen3, without embeddings or an output head. `heads`: None
    for those of the target. With a `selector` it is of DFlash 2, with a `markov_rank` of DSpark."""

    n_layer: int
    n_ff: int
    block_size: int = 16
    heads: Heads | None = None
    selector: Selector | None = None
    markov_rank: int = 0

    @property
    def family(self) -> str:
        return "dflash2" if self.selector else "dspark" if self.markov_rank else "dflash"


@dataclass(frozen=True)
class PairShape:
    """A target and its drafter: counts of layers, heads, values and tokens, without any weights.

    `n_ff` is the width of a dense layer. `tied`: the output head is the embedding matrix.
    `n_further`: layers behind the others that predict further tokens (`nextn`); such a target
    drafts with them, and has no drafter.
    """

    name: str
    architecture: Architecture
    n_layer: int
    n_embd: int
    n_ff: int
    heads: Heads
    n_vocab: int
    drafter: DrafterShape
    context_length: int = 40960
    rope_base: float = 1e6
    rms_eps: float = 1e-6
    tied: bool = False
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    short_conv: ShortConv | None = None
    n_further: int = 0
    pre_tokenizer: str = "qwen2"

    @property
    def pair_name(self) -> str:
        """The target's name, and the drafter's family unless it is plain DFlash."""
        family = self.drafter.family
        return self.name if family == "dflash" else f"{self.name}-{family}"

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose inputs are tapped: those after up to five layers, spread evenly from the
        second to the third from the end, as in the published drafters (arXiv 2602.06036, section
        5)."""
        first, last = 1, max(1, self.n_layer - 3)
        tapped = {round(first + i * (last - first) / (_N_TAPS - 1)) for i in range(_N_TAPS)}
        return tuple(layer + 1 for layer in sorted(tapped))

    def with_layers(self, n_layer: int | None) -> PairShape:
        """The same with another number of target layers. Raises InputError outside 3 to 512; with
        delta nets there must be one layer of attention, the fourth."""
        if n_layer is None or n_layer == self.n_layer:
            return self
        least = self.delta_net.interval if self.delta_net else 3
        if not least <= n_layer <= _MAX_LAYERS:
            raise InputError(
                f"{n_layer} layers for the shape {self.name}; expected {least} to {_MAX_LAYERS}"
            )
        return replace(self, name=f"{self.name}-l{n_layer}", n_layer=n_layer)


_QWEN3_8B = PairShape(
    name="qwen3-8b",
    architecture="qwen3",
    n_layer=36,
    n_embd=4096,
    n_ff=12288,
    heads=Heads(32, 8, 128),
    n_vocab=151936,
    drafter=DrafterShape(5, 12288),
)
_QWEN3_4B = replace(
    _QWEN3_8B, name="qwen3-4b", n_embd=2560, n_ff=9728, drafter=DrafterShape(5, 9728), tied=True
)
# No drafter is published for this model. That of the Coder below fits, as the sizes are equal.
_QWEN3_30B_A3B = replace(
    _QWEN3_8B,
    name="qwen3-30b-a3b",
    architecture="qwen3moe",
    n_layer=48,
    n_embd=2048,
    n_ff=6144,
    heads=Heads(32, 4, 128),
    drafter=DrafterShape(8, 6144),
    experts=Experts(128, 8, 768),
)
_QWEN3_CODER_30B_A3B = replace(
    _QWEN3_30B_A3B, name="qwen3-coder-30b-a3b", context_length=262144, rope_base=1e7
)
_LLAMA_3_1_8B = PairShape(
    name="llama-3.1-8b",
    architecture="llama",
    n_layer=32,
    n_embd=4096,
    n_ff=14336,
    heads=Heads(32, 8, 128),
    n_vocab=128256,
    drafter=DrafterShape(5, 14336, block_size=10),
    context_length=131072,
    rope_base=5e5,
    rms_eps=1e-5,
    pre_tokenizer="llama-bpe",
)
# The published drafter also has biases, which cost nothing and which llama.cpp does not load. Its
# feed-forward width follows from the size of the checkpoint, 1.46 GiB in BF16.
_GPT_OSS_20B = PairShape(
    name="gpt-oss-20b",
    architecture="gpt-oss",
    n_layer=24,
    n_embd=2880,
    n_ff=2880,
    heads=Heads(64, 8, 64),
    n_vocab=201088,
    drafter=DrafterShape(8, 7680, block_size=8),
    context_length=131072,
    rope_base=1.5e5,
    rms_eps=1e-5,
    experts=Experts(32, 4, 2880),
    pre_tokenizer="gpt-4o",
)
_GPT_OSS_120B = replace(
    _GPT_OSS_20B, name="gpt-oss-120b", n_layer=36, experts=Experts(128, 4, 2880)
)
_QWEN3_6_27B = PairShape(
    name="qwen3.6-27b",
    architecture="qwen35",
    n_layer=64,
    n_embd=5120,
    n_ff=17408,
    heads=Heads(24, 4, 256),
    n_vocab=248320,
    drafter=DrafterShape(5, 17408, heads=Heads(32, 8, 128)),
    context_length=262144,
    rope_base=1e7,
    delta_net=DeltaNet(16, 48),
    pre_tokenizer="qwen35",
)
_QWEN3_6_35B_A3B = replace(
    _QWEN3_6_27B,
    name="qwen3.6-35b-a3b",
    architecture="qwen35moe",
    n_layer=40,
    n_embd=2048,
    n_ff=6144,
    heads=Heads(16, 2, 256),
    drafter=DrafterShape(8, 6144, heads=Heads(32, 4, 128)),
    experts=Experts(256, 8, 512, n_ff_shared=512),
    delta_net=DeltaNet(16, 32),
)
_QWEN3_CODER_NEXT = replace(
    _QWEN3_6_35B_A3B,
    name="qwen3-coder-next",
    architecture="qwen3next",
    n_layer=48,
    n_ff=5120,
    n_vocab=151936,
    experts=Experts(512, 10, 512, n_ff_shared=512),
    delta_net=DeltaNet(16, 32, joined=True),
    pre_tokenizer="qwen2",
)
_LFM2_5_24B_A2B = PairShape(
    name="lfm2.5-24b-a2b",
    architecture="lfm2moe",
    n_layer=40,
    n_embd=2048,
    n_ff=11776,
    heads=Heads(32, 8, 64),
    n_vocab=65536,
    drafter=DrafterShape(5, 11776),
    context_length=32768,
    rms_eps=1e-5,
    tied=True,
    experts=Experts(64, 4, 1536, n_dense=2),
    short_conv=ShortConv(),
    pre_tokenizer="lfm2",
)


PAIR_SHAPES: dict[str, PairShape] = {
    shape.pair_name: shape
    for shape in (
        _QWEN3_8B,
        replace(_QWEN3_8B, drafter=replace(_QWEN3_8B.drafter, selector=Selector())),
        replace(_QWEN3_8B, drafter=replace(_QWEN3_8B.drafter, markov_rank=256)),
        _QWEN3_4B,
        _QWEN3_30B_A3B,
        _QWEN3_CODER_30B_A3B,
        _LLAMA_3_1_8B,
        _GPT_OSS_20B,
        _GPT_OSS_120B,
        _QWEN3_6_27B,
        replace(_QWEN3_6_27B, name="qwen3.6-27b-mtp", n_further=1),
        _QWEN3_6_35B_A3B,
        replace(_QWEN3_6_35B_A3B, name="qwen3.6-35b-a3b-mtp", n_further=1),
        _QWEN3_CODER_NEXT,
        _LFM2_5_24B_A2B,
        replace(_LFM2_5_24B_A2B, drafter=replace(_LFM2_5_24B_A2B.drafter, markov_rank=256)),
    )
}


def find_shape(name: str) -> PairShape:
    """The shape of that name. Raises InputError, which lists the names."""
    if name not in PAIR_SHAPES:
        raise InputError(f"no shape {name!r}; expected one of {', '.join(PAIR_SHAPES)}")
    return PAIR_SHAPES[name]
