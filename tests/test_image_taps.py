"""Hidden states at the rows of an image, which the drafter gets: those of a reference in PyTorch,
which is given the rows that libmtmd makes of the picture."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from dflash_local.target_model.projector import Projector
from dflash_local.target_model.target import Target
from gguf_files import parts, write
from vision_models import N_DEEPSTACK, picture, write_projector, write_vision_target

TAPPED = (2, 3, 5)

torch.set_num_threads(1)  # the products are small


class Qwen3VL:
    """The layers of a file in float64, as Qwen3-VL's own code has them: interleaved M-RoPE, and
    rows of an image that are added after the first layers."""

    def __init__(self, path: Path) -> None:
        keys, tensors = parts(path)
        self._keys = {name.rpartition("qwen3vl.")[2]: value[0] for name, value in keys.items()}
        self._weights = {
            name: torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float64))
            for name, (data, kind) in tensors.items()
        }
        self.embedding = self._weights["token_embd.weight"]

    def taps(self, rows: Tensor, positions: Tensor, deepstack: Tensor) -> Tensor:
        """What enters the tapped layers, [n, tapped, n_embd]. `rows` [n, n_embd], `positions`
        [3, n], `deepstack` [N_DEEPSTACK, n, n_embd]."""
        found = []
        for layer in range(max(TAPPED)):
            rows = rows + self._attention(
                layer, self._norm(f"blk.{layer}.attn_norm", rows), positions
            )
            x = self._norm(f"blk.{layer}.ffn_norm", rows)
            gate, up = (self._product(f"blk.{layer}.ffn_{name}", x) for name in ("gate", "up"))
            rows = rows + self._product(
                f"blk.{layer}.ffn_down", torch.nn.functional.silu(gate) * up
            )
            if layer < N_DEEPSTACK:
                rows = rows + deepstack[layer]
            if layer + 1 in TAPPED:
                found.append(rows)
        return torch.stack(found, 1)

    def _attention(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        n, size = len(x), self._keys["attention.key_length"]
        q, k, v = (self._product(f"blk.{layer}.attn_{name}", x).view(n, -1, size) for name in "qkv")
        q, k = (
            self._rotated(self._norm(f"blk.{layer}.attn_{name}_norm", heads), positions)
            for name, heads in (("q", q), ("k", k))
        )
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], 1) for heads in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self._product(
            f"blk.{layer}.attn_output", torch.einsum("hqk,khd->qhd", shares, v).reshape(n, -1)
        )

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        of_pair = torch.zeros(half, dtype=torch.long)  # time; every third height or width
        for axis in (1, 2):
            of_pair[axis : 3 * self._keys["rope.dimension_sections"][axis] : 3] = axis
        rate = self._keys["rope.freq_base"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (positions[of_pair].T * rate)[:, None]
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        epsilon = self._keys["attention.layer_norm_rms_epsilon"]
        scale = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return x * scale * self._weights[f"{name}.weight"]

    def _product(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T


def test_taps_at_an_image_are_the_references(tmp_path: Path) -> None:
    path = write_vision_target(tmp_path / "target.gguf", "qwen3vl")
    keys, tensors = parts(path)
    f32 = gguf.GGMLQuantizationType.F32
    exact = {
        name: (gguf.quants.dequantize(data, kind).astype(np.float32), f32)
        for name, (data, kind) in tensors.items()
    }
    path = write(tmp_path / "exact.gguf", keys, exact)
    reference = Qwen3VL(path)
    # Flash attention would round keys and values to 16 bits.
    with Target.load(
        path, n_ctx=512, n_batch=512, kv_type="f32", flash_attn=False, tapped_layers=TAPPED
    ) as target:
        projector = Projector(write_projector(tmp_path / "mmproj.gguf", path), target)
        before, after = (target.vocabulary.tokenize(text) for text in ("def add", "(a, b):"))
        (image,) = projector.read(picture(96, 64)).images.values()
        begin = len(before)
        seen = image.embeddings(begin).result()
        end = begin + image.n_positions
        target.decode(before, range(begin), [0] * begin, [False] * begin)
        taps = [target.stored(target.numbers)]
        target.decode_image(0, begin, seen, range(len(seen.rows)), image.n_positions)
        taps.append(target.stored(target.numbers))
        n = len(after)
        target.decode(after, range(end, end + n), [0] * n, [False] * n)
        taps.append(target.stored(target.numbers))
    size = reference.embedding.shape[1]
    assert seen.rows.shape[1] == (1 + N_DEEPSTACK) * size
    shown = torch.from_numpy(seen.rows).double()
    rows = torch.cat((reference.embedding[before], shown[:, :size], reference.embedding[after]))
    added = torch.zeros(N_DEEPSTACK, len(rows), size, dtype=torch.float64)
    for layer in range(N_DEEPSTACK):
        added[layer, begin : begin + len(shown)] = shown[:, (layer + 1) * size :][:, :size]
    text = [torch.arange(first, first + n) for first, n in ((0, begin), (end, len(after)))]
    positions = torch.cat(
        (text[0].expand(3, -1), torch.from_numpy(seen.positions[:3]), text[1].expand(3, -1)), 1
    )
    expected = reference.taps(rows, positions, added).reshape(len(rows), -1).numpy()
    found = np.concatenate(taps)
    assert np.abs(found - expected).max() <= 1e-3  # 1e-5 was seen
