"""GGUF files made for a test: small ones from nothing, and changed copies of shipped ones."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dflash_local.gguf.file import GgufFile
from dflash_local.gguf.header import TensorInfo

Value = tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]
Tensor = tuple[np.ndarray, gguf.GGMLQuantizationType]

UINT32 = gguf.GGUFValueType.UINT32
INT32 = gguf.GGUFValueType.INT32
FLOAT32 = gguf.GGUFValueType.FLOAT32
BOOL = gguf.GGUFValueType.BOOL
STRING = gguf.GGUFValueType.STRING
ARRAY = gguf.GGUFValueType.ARRAY


def write(path: Path, keys: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Path:
    """Write a GGUF; `keys` holds `general.architecture`."""
    writer = gguf.GGUFWriter(path, keys["general.architecture"][0])
    for name, (value, kind, element) in keys.items():
        if name == "general.alignment":
            writer.add_custom_alignment(value)
        elif name != "general.architecture":
            writer.add_key_value(name, value, kind, sub_type=element)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_of(source: str | Path) -> dict[str, Value]:
    """`gguf` takes half a second to read a vocabulary."""
    file, found = GgufFile.open(source), dict[str, Value]()
    for name, value in file.metadata.items():
        kind = file.value_types[name]
        element = gguf.GGUFValueType[kind[9:].upper()] if kind.startswith("array of ") else None
        found[name] = value, ARRAY if element else gguf.GGUFValueType[kind.upper()], element
    return found


_DTYPES: dict[str, type[np.generic]] = {
    **{"F16": np.float16, "F32": np.float32, "F64": np.float64},
    **{"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64},
}


def tensors_of(source: Path) -> dict[str, Tensor]:
    """As `gguf` has them: rows of bytes, where numpy does not know the type."""
    content, found = np.fromfile(source, np.uint8), dict[str, Tensor]()
    content.flags.writeable = False  # who changes one makes another
    for name, info in GgufFile.open(source).tensors.items():
        kind, shape = gguf.GGMLQuantizationType[info.type_name], info.shape[::-1]
        dtype = _DTYPES.get(info.type_name)
        if dtype is None:
            dtype, shape = np.uint8, gguf.quant_shape_to_byte_shape(shape, kind)
        data = content[info.offset : info.offset + info.n_bytes].view(dtype)
        found[name] = data.reshape(shape), kind
    return found


@lru_cache
def parts(source: Path) -> tuple[Mapping[str, Value], Mapping[str, Tensor]]:
    """Keys and tensors of a good file, which does not change."""
    return keys_of(source), tensors_of(source)


def changed(
    source: Path,
    path: Path,
    *,
    keys: Mapping[str, Value | None] | None = None,
    tensors: Callable[[dict[str, Tensor]], Any] | None = None,
) -> Path:
    """A copy of `source` at `path` with keys replaced (None: left out) and tensors changed."""
    good_keys, good_tensors = parts(source)
    all_keys, all_tensors = dict(good_keys), dict(good_tensors)
    for name, value in (keys or {}).items():
        if value is None:
            all_keys.pop(name)
        else:
            all_keys[name] = value
    if tensors is not None:
        tensors(all_tensors)
    return write(path, all_keys, all_tensors)


def spoil(tensors: dict[str, Tensor]) -> None:
    """For `changed`: a model or a drafter that puts out no numbers."""
    values, kind = tensors["output_norm.weight"]
    tensors["output_norm.weight"] = (np.full_like(values, np.nan), kind)


def edited(
    file: GgufFile,
    *,
    keys: Mapping[str, Value | None] | None = None,
    tensors: Mapping[str, tuple[str, tuple[int, ...]] | None] | None = None,
) -> GgufFile:
    """`file` as if its header had these keys, and tensors of these types and shapes (None: left
    out). Nothing is written."""
    metadata, types, infos = dict(file.metadata), dict(file.value_types), dict(file.tensors)
    for name, value in (keys or {}).items():
        metadata.pop(name, None)
        if value is not None:
            metadata[name], kind, element = value
            array = f"array of {element.name.lower()}" if element is not None else ""
            types[name] = array or kind.name.lower()
    for name, tensor in (tensors or {}).items():
        infos.pop(name, None)
        if tensor is not None:
            infos[name] = info(name, *tensor)
    return replace(file, metadata=metadata, value_types=types, tensors=infos)


def of_architecture(file: GgufFile, name: str) -> GgufFile:
    """`file` as if it were of another architecture."""
    old = f"{file.architecture}."
    mine = [key for key in file.metadata if key.startswith(old)]
    renamed = {key.replace(old, f"{name}.", 1): file.metadata[key] for key in mine}
    kinds = {key.replace(old, f"{name}.", 1): file.value_types[key] for key in mine}
    metadata = {**file.metadata, **renamed, "general.architecture": name}
    return replace(file, metadata=metadata, value_types={**file.value_types, **kinds})


def info(name: str, kind: str, shape: tuple[int, ...]) -> TensorInfo:
    """A tensor of a ggml type and a shape in ggml's order."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    return TensorInfo(name, shape, int(number), kind, 0, math.prod(shape) // block * size)


def dequantised(
    source: Path, path: Path, floats: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> Path:
    """A copy of `source` at `path` with all its matrices in `floats`, and the rest in F32."""

    def to_floats(tensors: dict[str, Tensor]) -> None:
        for name, (data, kind) in tensors.items():
            values = gguf.quants.dequantize(data, kind).astype(np.float32)
            wanted = floats if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            tensors[name] = gguf.quants.quantize(values, wanted), wanted

    return changed(source, path, tensors=to_floats)


def small(path: Path) -> Path:
    """A well-formed file of a few hundred bytes: every kind of value, two tensors."""
    keys: dict[str, Value] = {
        "general.architecture": ("qwen3", STRING, None),
        "qwen3.block_count": (2, UINT32, None),
        "qwen3.rope.freq_base": (10000.0, FLOAT32, None),
        "qwen3.some_flag": (True, BOOL, None),
        "qwen3.some_list": ([1, -2, 3], ARRAY, INT32),
        "tokenizer.ggml.model": ("gpt2", STRING, None),
        "tokenizer.ggml.tokens": (["a", "b", "ab", "é"], ARRAY, STRING),
        "tokenizer.ggml.token_type": ([1, 1, 1, 1], ARRAY, INT32),
        "tokenizer.ggml.merges": (["a b"], ARRAY, STRING),
    }
    f32, q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
    tensors: dict[str, Tensor] = {
        "token_embd.weight": (np.zeros((4, 34), np.uint8), q8),
        "output_norm.weight": (np.ones(32, np.float32), f32),
    }
    return write(path, keys, tensors)
