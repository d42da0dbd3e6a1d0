"""Tiny targets that see, with projectors of random weights, and pictures to show them.

The targets have the tiny target's weights under the names of families with images: `qwen3vl`,
whose positions are M-RoPE's, and `gemma3` and `gemma4`, which see all of an image at once, the
latter only in layers with a window. `qwen35` has random weights, and recurrent layers.
"""

import base64
import io
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from PIL import Image

import tiny_coder
from gguf_files import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Value, keys_of, parts, write
from hybrid import write_hybrid
from random_model import RandomModel
from windowed import write_windowed

KINDS = ("qwen3vl", "gemma3", "qwen35", "gemma4")
N_DEEPSTACK = 1
"""Layers of the qwen3vl target that take more from an image than its first layer's rows."""
_PATCH, _N_EMBD, _N_FF, _N_HEAD = 8, 32, 64, 2
_SIDE = 8
"""Patches of a side, for which the projectors have positions."""
_LONGEST = 1024
"""The same of gemma4, whose pictures keep their shape."""


def write_vision_target(path: Path, kind: str) -> Path:
    """Write the target of that kind."""
    source = tiny_coder.pair()[0]
    if kind == "gemma3":
        return write_windowed(path, source, 1024)
    if kind == "gemma4":
        return _write_gemma4(path, source)
    if kind == "qwen35":
        return write_hybrid(path, kind, source)
    keys, tensors = parts(source)
    renamed: dict[str, Value] = {
        name.replace("qwen3.", "qwen3vl."): value for name, value in keys.items()
    }
    renamed["general.architecture"] = ("qwen3vl", STRING, None)
    half = keys["qwen3.attention.key_length"][0] // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3, 0]
    renamed["qwen3vl.rope.dimension_sections"] = (sections, ARRAY, INT32)
    renamed["qwen3vl.n_deepstack_layers"] = (N_DEEPSTACK, UINT32, None)
    return write(path, renamed, tensors)


def _write_gemma4(path: Path, source: Path) -> Path:
    keys, tensors = parts(source)
    tensors = dict(tensors)  # `parts` keeps them for others
    renamed: dict[str, Value] = {
        name.replace("qwen3.", "gemma4."): value for name, value in keys.items()
    }
    renamed["general.architecture"] = ("gemma4", STRING, None)
    n_layers, n_embd = (keys[f"qwen3.{name}"][0] for name in ("block_count", "embedding_length"))
    half = keys["qwen3.attention.key_length"][0] // 2
    has_window = [layer % 2 == 0 for layer in range(n_layers)]
    renamed["gemma4.attention.sliding_window"] = (1024, UINT32, None)
    renamed["gemma4.attention.sliding_window_pattern"] = (has_window, ARRAY, BOOL)
    renamed["gemma4.embedding_length_per_layer_input"] = (0, UINT32, None)
    for name in ("key_length_swa", "value_length_swa"):
        renamed[f"gemma4.attention.{name}"] = (2 * half, UINT32, None)
    f32 = GGMLQuantizationType.F32
    tensors["rope_freqs.weight"] = np.ones(half, np.float32), f32
    table, kind = tensors["token_embd.weight"]
    tensors.setdefault("output.weight", (table, kind))
    scaled = gguf.quants.dequantize(table, kind) / np.sqrt(np.float32(n_embd))
    tensors["token_embd.weight"] = gguf.quants.quantize(scaled, kind), kind
    for layer in range(n_layers):
        for name in ("post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = np.full(n_embd, 0.1, np.float32), f32
        norm = f"blk.{layer}.attn_q_norm.weight"  # gemma4 does not scale its scores
        tensors[norm] = tensors[norm][0] / np.sqrt(np.float32(2 * half)), f32
    return write(path, renamed, tensors)


def write_projector(path: Path, target: Path, *, seed: int = 3) -> Path:
    """Write a projector for a target of `write_vision_target`."""
    keys = keys_of(target)
    architecture = keys["general.architecture"][0]
    n_embd = keys[f"{architecture}.embedding_length"][0]
    model = RandomModel("clip", "F32", seed)
    model.keys["clip.has_vision_encoder"] = (True, BOOL, None)
    model.keys["clip.use_gelu"] = (True, BOOL, None)
    for name in ("image_mean", "image_std"):
        model.keys[f"clip.vision.{name}"] = ([0.5] * 3, ARRAY, FLOAT32)
    model.numbers(
        vision__embedding_length=_N_EMBD,
        vision__feed_forward_length=_N_FF,
        vision__block_count=2,
        vision__attention__head_count=_N_HEAD,
        vision__attention__layer_norm_epsilon=1e-6,
        vision__projection_dim=n_embd,
        vision__image_size=_PATCH * _SIDE,
        vision__patch_size=_PATCH,
    )
    model.matrix("v.patch_embd.weight", _N_EMBD, 3, _PATCH, _PATCH, gain=3)
    table = (2, _LONGEST) if architecture == "gemma4" else (_SIDE**2,)
    model.plain("v.position_embd.weight", model.normal("positions", *table, _N_EMBD))
    if architecture != "gemma4":
        _vector(model, "v.patch_embd.bias", _N_EMBD)
        _norm(model, "v.post_ln", _N_EMBD)
    if architecture == "gemma4":
        model.key("projector_type", "gemma4v")
        model.numbers(vision__projector__scale_factor=2)
        model.matrix("mm.input_projection.weight", n_embd, _N_EMBD, gain=8)
    elif architecture == "gemma3":
        model.key("projector_type", "gemma3")
        model.numbers(vision__projector__scale_factor=2)
        model.norm("mm.soft_emb_norm.weight", _N_EMBD)
        model.matrix("mm.input_projection.weight", _N_EMBD, n_embd, gain=8)
    else:
        model.key("projector_type", "qwen3vl_merger")
        model.matrix("v.patch_embd.weight.1", _N_EMBD, 3, _PATCH, _PATCH, gain=3)
        _product(model, "mm.0", 128, 4 * _N_EMBD)
        _product(model, "mm.2", n_embd, 128)
        for layer in range(N_DEEPSTACK if architecture == "qwen3vl" else 0):
            _norm(model, f"v.deepstack.{layer}.norm", 4 * _N_EMBD)
            _product(model, f"v.deepstack.{layer}.fc1", 128, 4 * _N_EMBD)
            _product(model, f"v.deepstack.{layer}.fc2", n_embd, 128)
    for layer in range(2):
        block = f"v.blk.{layer}."
        names = ("attn_q", "attn_k", "attn_v")
        if not architecture.startswith("gemma"):
            names = ("attn_qkv",)
        for name in (*names, "attn_out"):
            _product(model, block + name, _N_EMBD * (3 if name == "attn_qkv" else 1), _N_EMBD)
        _norm(model, block + "ln1", _N_EMBD)
        _norm(model, block + "ln2", _N_EMBD)
        _product(model, block + "ffn_up", _N_FF, _N_EMBD)
        _product(model, block + "ffn_down", _N_EMBD, _N_FF)
    return model.write(path)


def _product(model: RandomModel, name: str, n_out: int, n_in: int) -> None:
    model.matrix(name + ".weight", n_out, n_in)
    _vector(model, name + ".bias", n_out)


def _norm(model: RandomModel, name: str, n: int) -> None:
    model.norm(name + ".weight", n)
    _vector(model, name + ".bias", n)


def _vector(model: RandomModel, name: str, n: int) -> None:
    model.plain(name, 0.1 * model.normal(name, n))


def picture(width: int = 64, height: int = 48, *, seed: int = 0, kind: str = "PNG") -> bytes:
    """A file of a picture with coarse random colours."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height)).save(file, kind)
    return file.getvalue()


def data_uri(data: bytes) -> str:
    """A picture as it is sent to a server."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asked(text: str, *pictures: bytes) -> dict[str, Any]:
    """A message of the user with pictures in front, in OpenAI's form."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_uri(each)}} for each in pictures
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
