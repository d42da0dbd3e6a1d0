"""The dimensions of a target and of the drafter that is published for it, without any weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dflash_local.errors import InputError

Architecture = Literal["qwen3", "qwen3moe", "llama", "gpt-oss"]

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_N_TAPS = 5


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each layer's feed-forward network."""

    n: int
    n_used: int
    n_ff: int


@dataclass(frozen=True)
class DrafterShape:
    """A DFlash drafter: layers like those of Qwen3, without embeddings or an output head."""

    n_layer: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    block_size: int = 16
    rope_base: float = 1e6


@dataclass(frozen=True)
class Shape:
    """A pair. Counts of tokens, layers, heads and values; `n_ff` of a dense layer."""

    name: str
    architecture: Architecture
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    drafter: DrafterShape
    context_length: int = 40960
    rope_base: float = 1e6
    rms_eps: float = 1e-6
    tied: bool = False
    """The output head is the embedding matrix."""
    experts: Experts | None = None
    pre_tokenizer: str = "qwen2"

    @property
    def taps(self) -> tuple[int, ...]:
        """Tapped layer inputs: behind up to five layers, evenly from the second to the third from
        the end, as the published drafters have it (arXiv 2602.06036, section 5)."""
        first, last = 1, max(1, self.n_layer - 3)
        behind = {round(first + i * (last - first) / (_N_TAPS - 1)) for i in range(_N_TAPS)}
        return tuple(layer + 1 for layer in sorted(behind))

    def with_layers(self, n_layer: int | None) -> Shape:
        """The same with another number of target layers. Raises InputError outside 3 to 512."""
        if n_layer is None or n_layer == self.n_layer:
            return self
        if not 3 <= n_layer <= _MAX_LAYERS:
            raise InputError(
                f"{n_layer} layers for the shape {self.name}; expected 3 to {_MAX_LAYERS}"
            )
        return replace(self, name=f"{self.name}-l{n_layer}", n_layer=n_layer)
