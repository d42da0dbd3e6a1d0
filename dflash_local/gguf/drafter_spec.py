"""The contents of a drafter's GGUF file: the sizes and constants of a DFlash drafter (architecture
`dflash`), or an ordinary language model; and the heads in a target's own file."""

from dataclasses import dataclass
from typing import Literal

Family = Literal["dflash", "dflash2", "dspark"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of queries and keys, in the NeoX layout."""

    freq_base: float = 10000.0
    n_dims: int = 0
    """The number of rotated values of a head; the others stay as they are."""
    sections: tuple[int, ...] = ()
    """M-RoPE sections; empty for plain RoPE. Either way drafters rotate by the token position."""
    scaling: str = "none"
    """"none", "linear" or "yarn". As in llama.cpp for this architecture, yarn always uses
    ext_factor 1, beta_fast 32 and beta_slow 1, whatever the file says."""
    factor: float = 1.0
    """The context is stretched by this factor."""
    original_context: int = 0
    """Context length before the stretch, for yarn."""
    attn_factor: float = 1.0


@dataclass(frozen=True)
class ScaleSpec:
    """Constants of the forward pass; 0 means that the step is left out."""

    rms_eps: float
    attention: float
    """Scale of query times key."""
    embedding: float = 1.0
    value: float = 0.0
    """Scale of the attention's output."""
    logit: float = 0.0
    logit_softcap: float = 0.0
    activation: str = "silu"
    """"silu" or "gelu"."""


@dataclass(frozen=True)
class SelectorSpec:
    """The path selector and the convolutions of DFlash 2."""

    rank: int
    top_k: int
    """Candidates per position. The selector scores the steps between them."""
    kernel_size: int
    """Positions of the block that a convolution reads."""
    group_size: int
    """The number of neighbouring channels that share the dynamic part of a kernel."""


@dataclass(frozen=True)
class DrafterSpec:
    """The sizes of a drafter. The shapes of all its tensors follow from them."""

    family: Family
    block_size: int
    """Anchor and mask tokens of one block."""
    target_layers: tuple[int, ...]
    """Taps: tap k is the input of this layer of the target, so the output of the one before."""
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    mask_token_id: int
    sliding_window: int
    """The number of tokens that the layers in `sliding_layers` see; 0 without such layers."""
    sliding_layers: tuple[bool, ...]
    context_length: int
    rope: RopeSpec
    scales: ScaleSpec
    n_vocab_draft: int
    """Rows of the output head: `n_vocab`, or fewer, which the tensor `d2t` maps to tokens."""
    values_from_keys: bool = False
    """Whether there are no weights for values."""
    causal: bool = False
    """Whether positions of a block do not see the later ones."""
    attention_bias: bool = False
    """Whether the attention's projections have biases. Then llama.cpp does not load the file."""
    selector: SelectorSpec | None = None
    """DFlash 2 only."""
    markov_rank: int = 0
    """DSpark only."""
    sample_from_anchor: bool = False
    """Whether the output at the anchor is a draft, too (DSpark)."""

    @property
    def n_taps(self) -> int:
        return len(self.target_layers)

    @property
    def n_features(self) -> int:
        """Width of a context feature: the hidden states of all taps side by side."""
        return self.n_taps * self.n_embd

    @property
    def n_draft(self) -> int:
        """The most tokens that a block drafts."""
        return self.block_size - (0 if self.sample_from_anchor else 1)


@dataclass(frozen=True)
class ModelSpec:
    """An ordinary language model as a drafter. It reads tokens only, so it needs no taps."""

    n_vocab: int
    is_recurrent: bool = False
    n_draft: int = 8
    """The most tokens that it drafts at once. Each takes a pass, so more of them rarely pay."""
    target_layers: tuple[int, ...] = ()

    @property
    def block_size(self) -> int:
        """Anchor and drafts."""
        return 1 + self.n_draft


@dataclass(frozen=True)
class HeadLayerSpec:
    """The sizes of the first head's layer, if it is one that our own graph computes."""

    layer: int
    """Its number in the file."""
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert_used: int
    """0: a dense layer."""
    rms_eps: float
    expert_scale: float
    """Of the experts' weights; 0: none."""
    rope: RopeSpec
    is_gated: bool = True
    """Whether attention's output has a gate, which is made with the queries."""
    by_sigmoid: bool = False
    """Whether the router's chances are sigmoids, and not a softmax."""
    adds_to_one: bool = True
    """Whether the weights of a row's experts add up to one before they are scaled."""


@dataclass(frozen=True)
class HeadsSpec:
    """Layers behind those of a target, in its own file, that predict further tokens."""

    n_heads: int
    n_layer: int
    """Layers of the target itself."""
    layer: HeadLayerSpec | str
    """Or in words, why only llama.cpp's context for heads knows how to compute them."""

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The input of heads: the hidden state after all layers and the last norm."""
        return (self.n_layer,)

    @property
    def n_draft(self) -> int:
        """The most tokens at once. A single head was trained to go on from its own states; of
        several, each is for one token, and only the first is used."""
        return 6 if self.n_heads == 1 else 1

    @property
    def block_size(self) -> int:
        """Anchor and drafts."""
        return 1 + self.n_draft


@dataclass(frozen=True)
class AssistantSpec:
    """Layers that predict further tokens, in a file of their own, as Gemma 4's. They read the
    target's hidden state, and attend to the cells of the target's last two layers."""

    n_vocab: int
    target_layers: tuple[int, ...] = ()
    """Beside a target the number of its layers: the hidden state after all and the last norm."""
    n_draft: int = 6
    """The most tokens at once."""

    @property
    def block_size(self) -> int:
        """Anchor and drafts."""
        return 1 + self.n_draft


FileSpec = DrafterSpec | ModelSpec | AssistantSpec
"""Of a drafter that has a file of its own."""
AnySpec = FileSpec | HeadsSpec
