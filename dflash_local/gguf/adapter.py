"""LoRA adapters (arXiv 2106.09685) and control vectors for a target, checked before llama.cpp reads
them: of some faults it makes an abort."""

import re
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from dflash_local.gguf.file import GgufFile
from dflash_local.gguf.header import TensorInfo

_PARTS = ".lora_a", ".lora_b"
_TYPES = ("F32", "F16", "BF16", "Q8_0")
_DIRECTION = re.compile(r"direction\.([1-9]\d{0,3})")


def open_adapter(path: str, target: GgufFile) -> GgufFile:
    """A LoRA adapter whose tensors fit those of the target. Raises FileError."""
    file = GgufFile.open(path)
    if file.get("general.type") != "adapter" or file.get("adapter.type") != "lora":
        file.fail("no LoRA adapter (general.type 'adapter', adapter.type 'lora')")
    if file.architecture != target.architecture:
        file.fail(f"it is for {file.architecture} models, and the target is {target.architecture}")
    if file.value_types.get("adapter.lora.alpha", "float32") != "float32":
        file.fail("key 'adapter.lora.alpha' is no float32")
    if "adapter.alora.invocation_tokens" in file.metadata:
        file.fail("an activated LoRA, which acts after certain tokens alone; give a plain one")
    names = set()
    for tensor in file.tensors:
        name, dot, part = tensor.rpartition(".")
        if dot + part in _PARTS:
            names.add(name)
        elif not tensor.endswith("_norm.weight"):  # llama.cpp passes over these
            file.fail(f"tensor '{tensor}' is no part of a LoRA adapter ({' and '.join(_PARTS)})")
    for name in sorted(names):
        _check_pair(file, name, target)
    if not names:
        file.fail("it adapts no tensor")
    return file


def _check_pair(file: GgufFile, name: str, target: GgufFile) -> None:
    of_target = target.tensors.get(name)
    if of_target is None:
        file.fail(f"the target {target.path.name} has no tensor '{name}'; it adapts another model")
    a, b = (file.tensors.get(name + part) for part in _PARTS)
    if a is None or b is None:
        file.fail(f"'{name}' has only one of {' and '.join(_PARTS)}")
    for tensor in (a, b):
        if tensor.type_name not in _TYPES:
            file.fail(f"tensor '{tensor.name}' is {tensor.type_name}, not of {', '.join(_TYPES)}")
    (n_in, rank, *n_a), (rank_b, n_out, *n_b) = _padded(a), _padded(b)
    if name == "token_embd.weight":  # rows are looked up in A
        if "output.weight" not in target.tensors:  # llama.cpp aborts
            file.fail(f"it adapts '{name}', which is the target's head, too: llama.cpp cannot")
        (rank, n_out, *n_a), (rank_b, n_in, *n_b) = _padded(a), _padded(b)
    shape = _padded(of_target)
    if rank != rank_b or [n_in, n_out, *n_a] != shape or n_b != shape[2:]:
        parts = " and ".join(str(list(tensor.shape)) for tensor in (a, b))
        file.fail(f"'{name}' has parts of {parts}, and the target's is {list(of_target.shape)}")


def _padded(tensor: TensorInfo) -> list[int]:
    return [*tensor.shape, 1, 1, 1][:4]


def control_vector(
    files: Iterable[tuple[str, float]], target: GgufFile
) -> NDArray[np.float32] | None:
    """The sum of control vectors, [n_layer, n_embd]; row i is added after layer i. None without
    files. Raises FileError."""
    total: NDArray[np.float32] | None = None
    n_layer = target.require(f"{target.architecture}.block_count", int)
    n_embd = target.require(f"{target.architecture}.embedding_length", int)
    for path, scale in files:
        file = GgufFile.open(path)
        if not file.tensors:
            file.fail("no control vector: it has no tensor 'direction.1' or of another layer")
        total = np.zeros((n_layer, n_embd), np.float32) if total is None else total
        for layer, values in _directions(file, n_layer, n_embd):
            total[layer] += np.float32(scale) * values
    return total


def _directions(
    file: GgufFile, n_layer: int, n_embd: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    for name, tensor in file.tensors.items():
        match = _DIRECTION.fullmatch(name)
        if match is None or tensor.type_name != "F32" or tensor.shape != (n_embd,):
            file.fail(
                f"tensor '{name}' is {tensor.type_name} {list(tensor.shape)}, expected "
                f"direction.LAYER, F32 [{n_embd}]"
            )
        if int(match[1]) >= n_layer:
            file.fail(f"tensor '{name}': the target has layers 0 to {n_layer - 1}")
        values = np.frombuffer(file.data(tensor, 0, tensor.n_bytes), "<f4")
        if not np.isfinite(values).all():
            file.fail(f"tensor '{name}' has numbers that are not finite")
        yield int(match[1]), values
