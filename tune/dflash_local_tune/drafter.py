"""The DFlash drafters in PyTorch, on the tensors and keys of a GGUF of the architecture `dflash`.

The method is that of arXiv 2602.06036. Context rows make keys and values only; a block of
`[anchor, mask, mask, ...]` attends to the rows before its anchor and to itself, without a causal
mask. It is written for reading, so that tests hold the native drafter against it, and for
gradients. Sizes: S texts, A blocks of B tokens, T context rows, G heads of keys and values. Blocks
of several texts are in the order of the texts, equally many of each.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dflash_local.gguf.drafter_spec import Family


@dataclass
class Context:
    """Injected keys and values of some texts, per layer: [S, T, G, head_dim]."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0


class TorchDrafter:
    """A drafter's forward pass.

    `keys` are those of the file without `dflash.`, `weights` its tensors by name, in the order of
    rows first. `embed` gives the embeddings of token ids [...]: [..., n_embd]. `head` is the output
    head, [rows, n_embd]. `cache_dtype` is the type to which keys and values are rounded, those of
    the block included.
    """

    def __init__(
        self,
        keys: Mapping[str, Any],
        weights: dict[str, Tensor],
        mask_token: int,
        n_vocab: int,
        embed: Callable[[Tensor], Tensor],
        head: Tensor,
        *,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.keys = keys
        self.weights = weights
        self.adapters: dict[str, tuple[Tensor, Tensor]] = {}
        """Low-rank additions to weights, by their names without `.weight`: [rank, n_in] and
        [n_out, rank] (LoRA, arXiv 2106.09685)."""
        self.tap_scale: Tensor | None = None
        """By which the features are multiplied before `fc`, [n_taps * n_embd], in their type; None:
        they are not."""
        self.mask_token = mask_token
        self.n_vocab = n_vocab
        self.embed = embed
        self.head = head
        self.draft_window = 0
        """Rows, the last injected ones, that a block attends to; 0: all."""
        self._cache_dtype = cache_dtype
        self.n_layer = int(keys["block_count"])
        self.n_head = int(keys["attention.head_count"])
        self.n_head_kv = int(keys["attention.head_count_kv"])
        self.head_dim = int(keys["attention.key_length"])
        self.block_size = int(keys["block_size"])
        self.feature_size = len(keys["target_layers"]) * int(keys["embedding_length"])
        self.sliding_window = int(keys.get("attention.sliding_window", 0))
        everywhere = [self.sliding_window > 0] * self.n_layer
        self.is_sliding = keys.get("attention.sliding_window_pattern", everywhere)

    @property
    def family(self) -> Family:
        if "selector_hidden.weight" in self.weights:
            return "dflash2"
        return "dspark" if "markov_w1.weight" in self.weights else "dflash"

    @property
    def first_draft(self) -> int:
        """The first row of a block that drafts a token; that of the anchor is row 0."""
        from_anchor = self.keys.get("sample_from_anchor", self.family == "dspark")
        return 0 if from_anchor and self.family != "dflash2" else 1

    # The context, and blocks after it

    def inject(self, features: Tensor, start: int = 0) -> Context:
        """Keys and values of context features, [T, n_taps * n_embd] or of several texts [S, T,
        n_taps * n_embd], at positions `start` and up. Shorter texts have any rows after their own:
        no block sees a row at or behind its anchor."""
        texts = features.reshape(-1, *features.shape[-2:])
        if self.tap_scale is not None:
            texts = texts * self.tap_scale
        fused = self._norm(self.linear("fc", texts), "enc.output_norm")
        positions = torch.arange(start, start + texts.shape[1], device=features.device)
        pairs = [self._keys_and_values(i, fused, positions) for i in range(self.n_layer)]
        return Context([keys for keys, _ in pairs], [values for _, values in pairs])

    def hidden(self, context: Context, anchors: Tensor, starts: Tensor) -> Tensor:
        """The output head's input, [A, B, n_embd], for blocks after `anchors`, token ids [A], at
        the positions `starts` [A]. Each sees the rows of its text before its own."""
        tokens = torch.full((len(anchors), self.block_size), self.mask_token, device=anchors.device)
        tokens[:, 0] = anchors
        positions = starts[:, None] + torch.arange(self.block_size, device=starts.device)
        rows = self.embed(tokens) * (self.keys.get("embedding_scale") or 1.0)
        for layer in range(self.n_layer):
            rows = self._layer(layer, rows, positions, context)
        return self._norm(rows, "output_norm")

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., n_vocab], neither scaled nor capped; minus infinity for tokens that the drafter's
        own vocabulary lacks."""
        scale = self.weights.get("output.scale", 1.0) if "output.weight" in self.weights else 1.0
        products = functional.linear(hidden.to(self.head.dtype), self.head)
        return self.spread(products * scale, -math.inf)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits scaled and capped, as the keys say."""
        logits = logits * (self.keys.get("logit_scale") or 1.0)
        cap = self.keys.get("final_logit_softcapping")
        return cap * torch.tanh(logits / cap) if cap else logits

    # The heads of the families

    def markov(self, before: Tensor) -> Tensor:
        """DSpark: the addition to the logits after these tokens [...]: [..., n_vocab]."""
        rows = self.linear("markov_w2", self.weights["markov_w1.weight"][before])
        return self.spread(rows, 0)

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """DSpark: the logit [...] of the chance that the target accepts a draft after the token
        before it; None without such a head."""
        if "conf_proj.weight" not in self.weights:
            return None
        row = torch.cat([hidden, self.weights["markov_w1.weight"][before].to(hidden.dtype)], dim=-1)
        return self.linear("conf_proj", row)[..., 0]

    def select(self, hidden: Tensor, logits: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """DFlash 2: the selector's candidates [..., k] among scaled logits, and their scores after
        the tokens before them [...]."""
        ids = logits.topk(self.keys["selector_top_k"]).indices
        step = self.weights["selector_predecessor.weight"][before]
        step = step * self.linear("selector_hidden", hidden)
        successors = self.weights["selector_successor.weight"][ids]
        scores = torch.einsum("...r,...kr->...k", step, successors)
        return ids, scores + logits.gather(-1, ids)

    def spread(self, rows: Tensor, rest: float) -> Tensor:
        """From the drafter's own vocabulary to the target's, `rest` for tokens it does not know."""
        if "d2t" not in self.weights:
            return rows
        wide = rows.new_full((*rows.shape[:-1], self.n_vocab), rest)
        wide[..., self.weights["d2t"].long()] = rows
        return wide

    # Layers

    def _layer(self, layer: int, hidden: Tensor, positions: Tensor, context: Context) -> Tensor:
        block = f"blk.{layer}."
        normed = self._norm(hidden, block + "attn_norm")
        kernels = self._kernels(block + "attn_conv", normed)
        normed = self._convolve(kernels, 0, normed)
        queries = _parts(self.linear(block + "attn_q", normed), self.n_head)
        queries = self._rope(self._norm(queries, block + "attn_q_norm"), positions)
        keys, values = self._keys_and_values(layer, normed, positions)
        mixed = self._attend(layer, queries, keys, values, positions, context)
        mixed = mixed * (self.keys.get("attention.value_scale") or 1.0)
        attended = self.linear(block + "attn_output", mixed.flatten(2))
        attended = self._convolve(kernels, 1, attended)
        hidden = hidden + self._norm_if_any(attended, block + "post_attention_norm")

        normed = self._norm(hidden, block + "ffn_norm")
        kernels = self._kernels(block + "ffn_conv", normed)
        normed = self._convolve(kernels, 0, normed)
        gate = self._activation(self.linear(block + "ffn_gate", normed))
        fed = self.linear(block + "ffn_down", gate * self.linear(block + "ffn_up", normed))
        fed = self._convolve(kernels, 1, fed)
        hidden = hidden + self._norm_if_any(fed, block + "post_ffw_norm")
        scale = self.weights.get(block + "layer_output_scale.weight")
        return hidden if scale is None else hidden * scale

    def _attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        context: Context,
    ) -> Tensor:
        """Attention of block queries [A, B, n_head, head_dim] over the context and their block:
        [A, B, n_head, head_dim]."""
        grouped = _parts(queries.flatten(2), self.n_head_kv, self.n_head // self.n_head_kv)
        scores = [torch.einsum("abgrd,acgd->agrbc", grouped, keys)]
        places = [positions]
        if len(context):
            known = context.keys[layer]
            of_texts = grouped.reshape(len(known), -1, *grouped.shape[1:])
            scores.insert(0, torch.einsum("sabgrd,stgd->sagrbt", of_texts, known).flatten(0, 1))
            rows = torch.arange(len(context), device=positions.device)
            places.insert(0, rows.expand(len(positions), -1))
        scale = self.keys.get("attention.scale") or 1 / math.sqrt(self.head_dim)
        hidden = self._unseen(layer, positions, torch.cat(places, dim=1), len(context))
        joined = torch.cat(scores, dim=-1).float() * scale
        joined = joined.masked_fill(hidden[:, None, None], -math.inf)
        sinks = self.weights.get(f"blk.{layer}.attn_sinks.weight")
        n_keys = joined.shape[-1]
        if sinks is not None:
            # A sink is one more key, of a constant score, whose value is zero.
            column = _parts(sinks, self.n_head_kv)[None, :, :, None, None]
            column = column.expand(*joined.shape[:-1], 1)
            joined = torch.cat([joined, column.to(joined.dtype)], dim=-1)
        shares = joined.softmax(dim=-1)[..., :n_keys].to(values.dtype)
        n_known = len(context)
        mixed = torch.einsum("agrbc,acgd->abgrd", shares[..., n_known:], values)
        if n_known:
            known = context.values[layer]
            of_texts = shares[..., :n_known].reshape(len(known), -1, *shares.shape[1:-1], n_known)
            mixed = mixed + torch.einsum("sagrbt,stgd->sabgrd", of_texts, known).flatten(0, 1)
        return mixed.flatten(2, 3)

    def _unseen(self, layer: int, queries: Tensor, keys: Tensor, n_known: int) -> Tensor:
        """The keys that a query does not see, bool [A, B, T + B], by the positions of both. The
        first `n_known` keys are context rows."""
        distance = queries[:, :, None] - keys[:, None, :]
        is_known = torch.arange(keys.shape[1], device=keys.device) < n_known
        from_anchor = distance[:, :1]
        found = is_known & (from_anchor <= 0)
        if self.draft_window:
            found = found | (from_anchor > self.draft_window)
        found = found.expand_as(distance)
        if self.is_sliding[layer]:
            found = found | (distance >= self.sliding_window)
        if self.keys.get("attention.causal", False):
            found = found | (distance < 0)
        return found

    def _keys_and_values(
        self, layer: int, rows: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        block = f"blk.{layer}."
        keys = _parts(self.linear(block + "attn_k", rows), self.n_head_kv)
        if block + "attn_v.weight" in self.weights:
            values = _parts(self.linear(block + "attn_v", rows), self.n_head_kv)
        else:
            values = self._rms_norm(keys)
        keys = self._rope(self._norm(keys, block + "attn_k_norm"), positions)
        return self._cached(keys), self._cached(values)

    def _cached(self, rows: Tensor) -> Tensor:
        return rows if self._cache_dtype is None else rows.to(self._cache_dtype).to(rows.dtype)

    def _kernels(self, name: str, rows: Tensor) -> Tensor | None:
        """Of each row, a kernel per channel before and one after: [A, B, 2, taps, n_embd]."""
        if name + "_base" not in self.weights:
            return None
        base = self.weights[name + "_base"]
        dynamic = _parts(self.linear(name + "_proj", rows), 2, base.shape[1])
        wide: Tensor = dynamic.repeat_interleave(base.shape[2] // dynamic.shape[-1], dim=-1)
        return base + wide

    @staticmethod
    def _convolve(kernels: Tensor | None, side: int, rows: Tensor) -> Tensor:
        """Each row mixed with those before it in the block."""
        if kernels is None:
            return rows
        n = rows.shape[1]
        mixed = torch.zeros_like(rows)
        for tap in range(min(kernels.shape[3], n)):
            shifted = kernels[:, tap:, side, tap] * rows[:, : n - tap]
            mixed = mixed + functional.pad(shifted, (0, 0, tap, 0))
        return mixed

    def _rope(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotate [..., heads, head_dim] by position [...]; the halves of a head are paired
        (NEOX)."""
        n_dims = int(self.keys.get("rope.dimension_count", self.head_dim))
        frequencies, magnitude = self._frequencies(n_dims, heads)
        angles = positions[..., None, None].to(frequencies.dtype) * frequencies
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
        turned, kept = heads[..., :n_dims], heads[..., n_dims:]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos, kept], dim=-1)

    def _frequencies(self, n_dims: int, like: Tensor) -> tuple[Tensor, float]:
        """Angle per position of each pair of dimensions, and the magnitude (YaRN, 2309.00071)."""
        base = float(self.keys.get("rope.freq_base", 10000.0))
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        index = torch.arange(0, n_dims, 2, dtype=dtype, device=like.device)
        plain = base ** (-index / n_dims)
        if "rope_freqs.weight" in self.weights:
            plain = plain / self.weights["rope_freqs.weight"]
        kind = self.keys.get("rope.scaling.type", "linear")
        factor = self.keys.get("rope.scaling.factor") or 1.0
        magnitude = self.keys.get("rope.scaling.attn_factor", 1.0)
        if kind == "none" or factor == 1.0:
            return plain, magnitude
        if kind == "linear":
            return plain / factor, magnitude
        trained = self.keys.get("rope.scaling.original_context_length", self.keys["context_length"])

        def dimension(rotations: float) -> float:
            """The dimension that makes so many rotations within the trained context."""
            return n_dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(dimension(32)))
        high = min(n_dims - 1, math.ceil(dimension(1)))
        keep = 1 - ((index / 2 - low) / max(0.001, high - low)).clamp(0, 1)
        magnitude *= 1 + 0.1 * math.log(factor)
        return plain / factor * (1 - keep) + plain * keep, magnitude

    def _activation(self, gate: Tensor) -> Tensor:
        if self.keys.get("hidden_activation", "silu") == "silu":
            return functional.silu(gate)
        return functional.gelu(gate, approximate="tanh")

    def linear(self, name: str, rows: Tensor) -> Tensor:
        """The product of rows [..., n_in] with a weight, with its scale and bias, if any."""
        weight = self.weights[name + ".weight"]
        products = functional.linear(rows.to(weight.dtype), weight)
        if name in self.adapters:
            down, up = self.adapters[name]
            low = functional.linear(rows.to(down.dtype), down)
            products = products + functional.linear(low, up)
        products = products * self.weights.get(name + ".scale", 1.0)
        bias = self.weights.get(name + ".bias")
        return products if bias is None else products + bias

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        return self._rms_norm(rows) * self.weights[name + ".weight"]

    def _norm_if_any(self, rows: Tensor, name: str) -> Tensor:
        return self._norm(rows, name) if name + ".weight" in self.weights else rows

    def _rms_norm(self, rows: Tensor) -> Tensor:
        epsilon = self.keys["attention.layer_norm_rms_epsilon"]
        if rows.dtype in (torch.bfloat16, torch.float16):
            rows = rows.float()
        return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon)


def _parts(rows: Tensor, *sizes: int) -> Tensor:
    """The last axis in parts: [..., n] as [..., *sizes, rest]."""
    return rows.reshape(*rows.shape[:-1], *sizes, -1)
