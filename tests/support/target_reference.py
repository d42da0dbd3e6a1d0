"""Targets that see, in PyTorch: what enters their layers, by the layers of their families' own code
and the weights of a file."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from gguf_files import parts


@dataclass
class Rows:
    """A text with one image, as the first layer takes it: `values` [n, n_embd], `positions` [3, n]
    (time, height, width), and the rows `image` of it. `added` [n_layers, n, n_embd] goes in behind
    the first layers."""

    values: Tensor
    positions: Tensor
    image: range
    added: Tensor = field(default_factory=lambda: torch.zeros(0))

    def mask(self, *, at_once: bool) -> Tensor:
        """What a row does not see, bool [n, n]; all of an image at once, or no later row of it."""
        n = len(self.values)
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        if at_once:
            inside = slice(self.image.start, self.image.stop)
            hidden[inside, inside] = False
        return hidden


class TargetReference(ABC):
    """A target in float64."""

    def __init__(self, path: Path) -> None:
        keys, tensors = parts(path)
        architecture = keys["general.architecture"][0]
        self.keys = {
            name.removeprefix(architecture + "."): value[0] for name, value in keys.items()
        }
        self._weights = {
            name: torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float64))
            for name, (data, kind) in tensors.items()
        }
        self.n_embd = self.keys["embedding_length"]
        self.epsilon = self.keys["attention.layer_norm_rms_epsilon"]
        self.head_size = self.keys["attention.key_length"]

    def embedding(self, tokens: list[int]) -> Tensor:
        """The rows of tokens, [n, n_embd]."""
        return self._weights["token_embd.weight"][tokens]

    def taps(self, rows: Rows, tapped: tuple[int, ...]) -> Tensor:
        """What enters the tapped layers, [n, tapped, n_embd]."""
        found, x = {}, rows.values
        for i in range(max(tapped)):
            x = self.layer(i, x, rows)
            if i < len(rows.added):
                x = x + rows.added[i]
            found[i + 1] = x
        return torch.stack([found[i] for i in tapped], 1)

    @abstractmethod
    def layer(self, i: int, x: Tensor, rows: Rows) -> Tensor: ...

    def weight(self, i: int, name: str) -> Tensor:
        return self._weights[f"blk.{i}.{name}"]

    def product(self, i: int, name: str, x: Tensor) -> Tensor:
        return x @ self.weight(i, f"{name}.weight").T

    def norm(self, x: Tensor, weight: Tensor | float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * weight

    def named_norm(self, i: int, name: str, x: Tensor) -> Tensor:
        return self.norm(x, self.weight(i, f"{name}.weight"))

    def heads(self, i: int, name: str, x: Tensor, size: int) -> Tensor:
        """[n, heads, size]"""
        return self.product(i, name, x).view(len(x), -1, size)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
        """[n, heads * head_size] of [n, heads, head_size]. Some heads of `q` share one of `k`."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = scale * torch.einsum("qhd,khd->hqk", q, k)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, v).flatten(1)

    def rotated(self, heads: Tensor, positions: Tensor, base: float) -> Tensor:
        """Their first dimensions, `rope.dimension_count` if there is one, each turned with the one
        half of these further. With M-RoPE each pair has one of three positions."""
        n = self.keys.get("rope.dimension_count", heads.shape[-1])
        half = n // 2
        of_pair = torch.zeros(half, dtype=torch.long)  # time; every third height or width
        for axis in (1, 2) if "rope.dimension_sections" in self.keys else ():
            of_pair[axis : 3 * self.keys["rope.dimension_sections"][axis] : 3] = axis
        rate = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (positions[of_pair].T * rate)[:, None]
        first, second, rest = heads.split([half, half, heads.shape[-1] - n], -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def feed_forward(self, i: int, x: Tensor, activation: Any) -> Tensor:
        gate, up = (self.product(i, name, x) for name in ("ffn_gate", "ffn_up"))
        return self.product(i, "ffn_down", activation(gate) * up)


class Qwen3VL(TargetReference):
    """Interleaved M-RoPE, and rows of an image that are added behind the first layers."""

    def layer(self, i: int, x: Tensor, rows: Rows) -> Tensor:
        y, size = self.named_norm(i, "attn_norm", x), self.head_size
        q, k, v = (self.heads(i, f"attn_{name}", y, size) for name in "qkv")
        base = self.keys["rope.freq_base"]
        q, k = (
            self.rotated(self.named_norm(i, f"attn_{name}_norm", heads), rows.positions, base)
            for name, heads in (("q", q), ("k", k))
        )
        seen = self.attention(q, k, v, rows.mask(at_once=False), size**-0.5)
        x = x + self.product(i, "attn_output", seen)
        return x + self.feed_forward(i, self.named_norm(i, "ffn_norm", x), silu)


class Gemma(TargetReference):
    """Gemma 3 and 4: norms around both parts of a layer, windows with a base of their own, and
    images that are seen at once: by all layers, of Gemma 4 by those with a window."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_4 = "rope_freqs.weight" in self._weights

    def embedding(self, tokens: list[int]) -> Tensor:
        return super().embedding(tokens) * math.sqrt(self.n_embd)

    def layer(self, i: int, x: Tensor, rows: Rows) -> Tensor:
        y, size = self.named_norm(i, "attn_norm", x), self.head_size
        q, k, v = (self.heads(i, f"attn_{name}", y, size) for name in "qkv")
        has_window = i % 6 != 5
        if self.is_4:
            has_window = self.keys["attention.sliding_window_pattern"][i]
            v = self.norm(v, 1.0)
        base = 10_000.0 if has_window else self.keys["rope.freq_base"]
        q, k = (
            self.rotated(self.named_norm(i, f"attn_{name}_norm", heads), rows.positions, base)
            for name, heads in (("q", q), ("k", k))
        )
        mask = rows.mask(at_once=has_window or not self.is_4)
        seen = self.attention(q, k, v, mask, 1.0 if self.is_4 else size**-0.5)
        x = x + self.named_norm(i, "post_attention_norm", self.product(i, "attn_output", seen))
        y = self.feed_forward(i, self.named_norm(i, "ffn_norm", x), _gelu)
        return x + self.named_norm(i, "post_ffw_norm", y)


class Qwen35(TargetReference):
    """Gated delta nets, and every third layer gated attention, with interleaved M-RoPE in some of a
    head's dimensions."""

    def layer(self, i: int, x: Tensor, rows: Rows) -> Tensor:
        y = self.named_norm(i, "attn_norm", x)
        x = x + (self._attention(i, y, rows) if i % 3 == 2 else self._delta_net(i, y))
        return x + self.feed_forward(i, self.named_norm(i, "post_attention_norm", x), silu)

    def _attention(self, i: int, x: Tensor, rows: Rows) -> Tensor:
        size, base = self.head_size, self.keys["rope.freq_base"]
        q, gate = self.heads(i, "attn_q", x, 2 * size).chunk(2, -1)
        k, v = (self.heads(i, f"attn_{name}", x, size) for name in "kv")
        q, k = (
            self.rotated(self.named_norm(i, f"attn_{name}_norm", heads), rows.positions, base)
            for name, heads in (("q", q), ("k", k))
        )
        seen = self.attention(q, k, v, rows.mask(at_once=False), size**-0.5)
        return self.product(i, "attn_output", seen * gate.flatten(1).sigmoid())

    def _delta_net(self, i: int, x: Tensor) -> Tensor:
        n, size, n_values = len(x), self.keys["ssm.state_size"], self.keys["ssm.time_step_rank"]
        n_keys = self.keys["ssm.group_count"]
        kernel = self.weight(i, "ssm_conv1d.weight")  # [channels, taps]
        mixed = self.product(i, "attn_qkv", x)
        padded = torch.cat((mixed.new_zeros(kernel.shape[1] - 1, mixed.shape[1]), mixed))
        mixed = silu(sum(padded[j : j + n] * kernel[:, j] for j in range(kernel.shape[1])))
        q, k, v = (
            part.view(n, -1, size)
            for part in mixed.split([n_keys * size, n_keys * size, n_values * size], -1)
        )
        q, k = (
            y.repeat(1, n_values // n_keys, 1)
            for y in (_unit(q, self.epsilon), _unit(k, self.epsilon))
        )
        beta = self.product(i, "ssm_beta", x).sigmoid()
        decay = softplus(self.product(i, "ssm_alpha", x) + self.weight(i, "ssm_dt.bias"))
        decay = (decay * self.weight(i, "ssm_a")).exp()
        state, found = q.new_zeros(n_values, size, size), []
        for t in range(n):
            state = state * decay[t, :, None, None]
            known = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - known))
            found.append(torch.einsum("hkv,hk->hv", state, q[t]) * size**-0.5)
        gate = silu(self.product(i, "attn_gate", x)).view(n, -1, size)
        out = self.norm(torch.stack(found), self.weight(i, "ssm_norm.weight")) * gate
        return self.product(i, "ssm_out", out.flatten(1))


def _unit(x: Tensor, epsilon: float) -> Tensor:
    """Vectors of length one."""
    return x / (x.square().sum(-1, keepdim=True) + epsilon).sqrt()


def _gelu(x: Tensor) -> Tensor:
    """ggml's on a CPU: from a table of halves."""
    half = x.half().float()
    return torch.nn.functional.gelu(half, approximate="tanh").half().double()


REFERENCES: dict[str, type[TargetReference]] = {
    "qwen3vl": Qwen3VL,
    "gemma3": Gemma,
    "gemma4": Gemma,
    "qwen35": Qwen35,
}
