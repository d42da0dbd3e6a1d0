"""A small PyTorch reference of the DFlash drafters, written for reading, not for speed.

It follows the method of arXiv 2602.06036 on the tensors and keys of a GGUF of the architecture
`dflash`. Context rows make keys and values only; a block of `[anchor, mask, mask, ...]` attends to
them and to itself, without a causal mask. Every weight is dequantised on load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


@dataclass
class Context:
    """Injected keys and values of one sequence, per layer: [rows, n_head_kv, head_dim]."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Reference:
    """The drafter at `drafter_path`; embeddings and output head are the target's where it has none.

    Computes in `dtype`. `cache_dtype` is the type to which keys and values are rounded, those of
    the block included: float16 is what a cache of llama.cpp holds by default.
    """

    def __init__(
        self,
        drafter_path: str | Path,
        target_path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        reader = gguf.GGUFReader(drafter_path)
        self._keys: dict[str, Any] = {
            name.removeprefix("dflash."): value.contents()
            for name, value in reader.fields.items()
            if name.startswith("dflash.")
        }
        self._mask_token = int(reader.fields["tokenizer.ggml.mask_token_id"].contents())
        self._dtype, self._cache_dtype = dtype, cache_dtype
        self._weights = {tensor.name: _dequantize(tensor, dtype) for tensor in reader.tensors}
        self._embedding, self._head = self._target_ends(target_path)
        self._contexts: dict[int, Context] = {}
        self.draft_window = 0
        """Rows, the last injected ones, that a block attends to; 0: all."""

        self.n_layer = int(self._keys["block_count"])
        self.n_head = int(self._keys["attention.head_count"])
        self.n_head_kv = int(self._keys["attention.head_count_kv"])
        self.head_dim = int(self._keys["attention.key_length"])
        self.block_size = int(self._keys["block_size"])
        self.feature_size = len(self._keys["target_layers"]) * int(self._keys["embedding_length"])
        self.sliding_window = int(self._keys.get("attention.sliding_window", 0))
        everywhere = [self.sliding_window > 0] * self.n_layer
        self.is_sliding = self._keys.get("attention.sliding_window_pattern", everywhere)

    def length(self, seq: int) -> int:
        context = self._contexts.get(seq)
        return len(context.keys[0]) if context else 0

    def truncate(self, seq: int, length: int) -> None:
        self.copy(seq, seq, length)

    def copy(self, source: int, destination: int, length: int) -> None:
        """The first `length` rows of `source` become those of `destination`."""
        context = self._contexts.get(source, Context())
        self._contexts[destination] = Context(
            [rows[:length] for rows in context.keys], [rows[:length] for rows in context.values]
        )
        if length == 0:
            self.clear(destination)

    def clear(self, seq: int) -> None:
        self._contexts.pop(seq, None)

    def inject(self, seq: int, features: NDArray[np.float32]) -> None:
        """Append rows of context features [rows, n_taps * n_embd] at the next positions."""
        if len(features) == 0:
            return
        rows = torch.tensor(np.asarray(features)).to(self._dtype)
        fused = self._norm(self._linear("fc", rows), "enc.output_norm")
        start = self.length(seq)
        positions = torch.arange(start, start + len(rows))
        context = self._contexts.setdefault(seq, Context())
        for layer in range(self.n_layer):
            keys, values = self._keys_and_values(layer, fused, positions)
            if start == 0:
                context.keys.append(keys)
                context.values.append(values)
            else:
                context.keys[layer] = torch.cat([context.keys[layer], keys])
                context.values[layer] = torch.cat([context.values[layer], values])

    def draft(self, seq: int, anchor: int) -> Tensor:
        """Log-probabilities [drafted positions, n_vocab] of the tokens that follow `anchor`."""
        return torch.log_softmax(self.scaled(self.logits(seq, anchor))[self._first_draft :], -1)

    def logits(self, seq: int, anchor: int) -> Tensor:
        """Of the whole block, [block_size, n_vocab], neither scaled nor capped."""
        return self._logits(self._hidden(seq, anchor))

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits scaled and capped, as the keys say."""
        logits = logits * (self._keys.get("logit_scale") or 1.0)
        cap = self._keys.get("final_logit_softcapping")
        return cap * torch.tanh(logits / cap) if cap else logits

    def draft_chain(self, seq: int, anchor: int, tokens: list[int]) -> Tensor:
        """DSpark: log-probabilities [len(tokens), n_vocab], each given the token before it."""
        before = [anchor, *tokens[:-1]]
        rows = [self.draft_after(seq, anchor, i, token) for i, token in enumerate(before)]
        return torch.stack(rows)

    def draft_after(self, seq: int, anchor: int, position: int, before: int) -> Tensor:
        """DSpark: log-probabilities [n_vocab] of a drafted position, given the token before it."""
        logits = self.logits(seq, anchor)[self._first_draft + position]
        row = self._weights["markov_w1.weight"][before]
        bias = self._spread(self._linear("markov_w2", row)[None], 0)[0]
        return torch.log_softmax(self.scaled(logits + bias), dim=-1)

    def confidence(self, seq: int, anchor: int, position: int, before: int) -> float:
        """DSpark: the chance that the target accepts a drafted position after this token."""
        hidden = self._hidden(seq, anchor)[self._first_draft + position]
        row = torch.cat([hidden, self._weights["markov_w1.weight"][before]])
        return float(torch.sigmoid(self._linear("conf_proj", row))[0])

    @torch.no_grad()
    def best_chain(self, seq: int, anchor: int, n: int) -> list[int]:
        """The n tokens that each family drafts: the best of each position after the one before."""
        hidden = self._hidden(seq, anchor)[self._first_draft :][:n]
        logits = self._logits(hidden)
        path = [anchor]
        for row, state in zip(logits, hidden, strict=True):
            before = torch.tensor(path[-1:])
            if "markov_w1.weight" in self._weights:
                bias = self._linear("markov_w2", self._weights["markov_w1.weight"][before])
                path.append(int(self.scaled(row + self._spread(bias, 0)[0]).argmax()))
            elif "selector_hidden.weight" in self._weights:
                scores = self._candidate_scores(row[None], state[None], before)
                path.append(int(scores[0].argmax()))
            else:
                path.append(int(row.argmax()))
        return path[1:]

    @property
    def _first_draft(self) -> int:
        has_markov = "markov_w1.weight" in self._weights
        return 0 if self._keys.get("sample_from_anchor", has_markov) else 1

    def draft_path(self, seq: int, anchor: int, tokens: list[int]) -> Tensor:
        """DFlash 2: as `draft_chain`, minus infinity for all but the selector's candidates."""
        return self.draft_steps(seq, anchor, [anchor, *tokens[:-1]])

    def draft_steps(self, seq: int, anchor: int, tokens: list[int]) -> Tensor:
        """DFlash 2: log-probabilities [len(tokens), n_vocab] of the positions after these tokens,
        minus infinity for all but the selector's candidates."""
        hidden = self._hidden(seq, anchor)[1:][: len(tokens)]
        return self._candidate_scores(self._logits(hidden), hidden, torch.tensor(tokens))

    def _candidate_scores(self, logits: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [n, n_vocab] of rows of logits after these tokens."""
        logits = self.scaled(logits)
        ids = logits.topk(self._keys["selector_top_k"]).indices
        before = self._weights["selector_predecessor.weight"][tokens]
        step = before * self._linear("selector_hidden", hidden)
        scores = torch.einsum("nr,nkr->nk", step, self._weights["selector_successor.weight"][ids])
        rows = torch.full_like(logits, -math.inf)
        return rows.scatter(1, ids, torch.log_softmax(scores + logits.gather(1, ids), dim=-1))

    def _hidden(self, seq: int, anchor: int) -> Tensor:
        """What the output head reads: [block_size, n_embd]."""
        tokens = torch.tensor([anchor] + [self._mask_token] * (self.block_size - 1))
        start = self.length(seq)
        positions = torch.arange(start, start + self.block_size)
        context = self._contexts.get(seq)
        hidden = self._embedding[tokens] * (self._keys.get("embedding_scale") or 1.0)
        for layer in range(self.n_layer):
            hidden = self._layer(layer, hidden, positions, context)
        return self._norm(hidden, "output_norm")

    def _logits(self, hidden: Tensor) -> Tensor:
        scale = self._weights.get("output.scale", 1.0) if "output.weight" in self._weights else 1.0
        return self._spread(hidden @ self._head.T * scale, -math.inf)

    def _spread(self, rows: Tensor, rest: float) -> Tensor:
        """From the drafter's own vocabulary to the target's, `rest` for what it does not know."""
        if "d2t" not in self._weights:
            return rows
        wide = rows.new_full((len(rows), len(self._embedding)), rest)
        wide[:, self._weights["d2t"].long()] = rows
        return wide

    def _layer(
        self, layer: int, hidden: Tensor, positions: Tensor, context: Context | None
    ) -> Tensor:
        block = f"blk.{layer}."
        normed = self._norm(hidden, block + "attn_norm")
        kernels = self._kernels(block + "attn_conv", normed)
        normed = self._convolve(kernels, 0, normed)
        queries = self._linear(block + "attn_q", normed).reshape(len(normed), self.n_head, -1)
        queries = self._rope(self._norm(queries, block + "attn_q_norm"), positions)
        keys, values = self._keys_and_values(layer, normed, positions)
        if context is not None:
            keys = torch.cat([context.keys[layer], keys])
            values = torch.cat([context.values[layer], values])
        mixed = self._attend(layer, queries, keys, values, positions)
        mixed = mixed * (self._keys.get("attention.value_scale") or 1.0)
        attended = self._linear(block + "attn_output", mixed.flatten(1))
        attended = self._convolve(kernels, 1, attended)
        hidden = hidden + self._norm_if_any(attended, block + "post_attention_norm")

        normed = self._norm(hidden, block + "ffn_norm")
        kernels = self._kernels(block + "ffn_conv", normed)
        normed = self._convolve(kernels, 0, normed)
        gate = self._activation(self._linear(block + "ffn_gate", normed))
        fed = self._linear(block + "ffn_down", gate * self._linear(block + "ffn_up", normed))
        fed = self._convolve(kernels, 1, fed)
        hidden = hidden + self._norm_if_any(fed, block + "post_ffw_norm")
        scale = self._weights.get(block + "layer_output_scale.weight")
        return hidden if scale is None else hidden * scale

    def _kernels(self, name: str, rows: Tensor) -> Tensor | None:
        """Of each row, a kernel per channel before and one after: [rows, 2, taps, n_embd]."""
        if name + "_base" not in self._weights:
            return None
        base = self._weights[name + "_base"]
        dynamic = self._linear(name + "_proj", rows).reshape(len(rows), 2, base.shape[1], -1)
        return base + dynamic.repeat_interleave(base.shape[2] // dynamic.shape[3], dim=3)

    @staticmethod
    def _convolve(kernels: Tensor | None, side: int, rows: Tensor) -> Tensor:
        """Each row mixed with those before it in the block."""
        if kernels is None:
            return rows
        mixed = torch.zeros_like(rows)
        for tap in range(min(kernels.shape[2], len(rows))):
            mixed[tap:] += kernels[tap:, side, tap] * rows[: len(rows) - tap]
        return mixed

    def _attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> Tensor:
        """Attention of block queries [B, n_head, head_dim] over keys at positions 0, 1, 2, ..."""
        group = self.n_head // self.n_head_kv
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        scale = self._keys.get("attention.scale") or 1 / math.sqrt(self.head_dim)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        distance = positions[:, None] - torch.arange(len(keys))[None, :]
        if self.draft_window:
            scores = scores.masked_fill(distance[0] > self.draft_window, -math.inf)
        if self.is_sliding[layer]:
            scores = scores.masked_fill(distance >= self.sliding_window, -math.inf)
        if self._keys.get("attention.causal", False):
            scores = scores.masked_fill(distance < 0, -math.inf)
        sinks = self._weights.get(f"blk.{layer}.attn_sinks.weight")
        if sinks is not None:
            # A sink is one more key, of a constant score, whose value is zero.
            column = sinks[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat([scores, column], dim=-1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)

    def _keys_and_values(
        self, layer: int, rows: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        block = f"blk.{layer}."
        keys = self._linear(block + "attn_k", rows).reshape(len(rows), self.n_head_kv, -1)
        if block + "attn_v.weight" in self._weights:
            values = self._linear(block + "attn_v", rows).reshape(len(rows), self.n_head_kv, -1)
        else:
            values = self._rms_norm(keys)
        keys = self._rope(self._norm(keys, block + "attn_k_norm"), positions)
        return self._cached(keys), self._cached(values)

    def _cached(self, rows: Tensor) -> Tensor:
        return rows if self._cache_dtype is None else rows.to(self._cache_dtype).to(self._dtype)

    def _rope(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotate [rows, heads, head_dim] by position; the halves of a head are paired (NEOX)."""
        n_dims = int(self._keys.get("rope.dimension_count", self.head_dim))
        frequencies, magnitude = self._frequencies(n_dims)
        angles = positions[:, None, None].to(self._dtype) * frequencies
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        turned, kept = heads[..., :n_dims], heads[..., n_dims:]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos, kept], dim=-1)

    def _frequencies(self, n_dims: int) -> tuple[Tensor, float]:
        """Angle per position of each pair of dimensions, and the magnitude (YaRN, 2309.00071)."""
        base = float(self._keys.get("rope.freq_base", 10000.0))
        index = torch.arange(0, n_dims, 2, dtype=self._dtype)
        plain = base ** (-index / n_dims)
        if "rope_freqs.weight" in self._weights:
            plain = plain / self._weights["rope_freqs.weight"]
        kind = self._keys.get("rope.scaling.type", "linear")
        factor = self._keys.get("rope.scaling.factor") or 1.0
        magnitude = self._keys.get("rope.scaling.attn_factor", 1.0)
        if kind == "none" or factor == 1.0:
            return plain, magnitude
        if kind == "linear":
            return plain / factor, magnitude
        trained = self._keys.get(
            "rope.scaling.original_context_length", self._keys["context_length"]
        )

        def dimension(rotations: float) -> float:
            """The dimension that makes so many rotations within the trained context."""
            return n_dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(dimension(32)))
        high = min(n_dims - 1, math.ceil(dimension(1)))
        keep = 1 - ((index / 2 - low) / max(0.001, high - low)).clamp(0, 1)
        magnitude *= 1 + 0.1 * math.log(factor)
        return plain / factor * (1 - keep) + plain * keep, magnitude

    def _activation(self, gate: Tensor) -> Tensor:
        if self._keys.get("hidden_activation", "silu") == "silu":
            return functional.silu(gate)
        return functional.gelu(gate, approximate="tanh")

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        products = rows @ self._weights[name + ".weight"].T
        products = products * self._weights.get(name + ".scale", 1.0)
        bias = self._weights.get(name + ".bias")
        return products if bias is None else products + bias

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        return self._rms_norm(rows) * self._weights[name + ".weight"]

    def _norm_if_any(self, rows: Tensor, name: str) -> Tensor:
        return self._norm(rows, name) if name + ".weight" in self._weights else rows

    def _rms_norm(self, rows: Tensor) -> Tensor:
        epsilon = self._keys["attention.layer_norm_rms_epsilon"]
        return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon)

    def _target_ends(self, target_path: str | Path) -> tuple[Tensor, Tensor]:
        """Token embeddings and output head: the drafter's own, else the target's (often tied)."""
        names = ("token_embd.weight", "output.weight")
        target = {
            tensor.name: _dequantize(tensor, self._dtype)
            for tensor in gguf.GGUFReader(target_path).tensors
            if tensor.name in names
        }
        target.setdefault("output.weight", target["token_embd.weight"])
        own = {name: self._weights[name] for name in names if name in self._weights}
        if "token_embd.weight" in own:
            own.setdefault("output.weight", own["token_embd.weight"])
        ends = target | own
        return ends["token_embd.weight"], ends["output.weight"]


def _dequantize(tensor: gguf.ReaderTensor, dtype: torch.dtype) -> Tensor:
    values = tensor.data
    if tensor.tensor_type != gguf.GGMLQuantizationType.I64:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.tensor(np.array(values, dtype=np.float32)).to(dtype)
