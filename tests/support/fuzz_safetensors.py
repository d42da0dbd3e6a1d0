"""Damage checkpoints and mask embeddings at random: the result is a FileError or a file.

    python tests/support/fuzz_safetensors.py 10000 [seed]

Files that our reader accepts must pass the safetensors package, too, with the same tensors.
"""

import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from damage import HOSTILE, damaged_bytes
from dflash_local.convert.files.checkpoint import Checkpoint
from dflash_local.convert.files.mask_embedding import read_mask_embedding
from dflash_local.errors import FileError


def checkpoint_bytes(folder: Path) -> bytes:
    path = folder / "seed.safetensors"
    tensors = {
        "fc.weight": torch.arange(24, dtype=torch.float32).reshape(4, 6),
        "norm.weight": torch.ones(6, dtype=torch.bfloat16),
        "layers.0.q.weight": torch.ones(3, 2, dtype=torch.float16),
        "d2t": torch.arange(5),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path.read_bytes()


def mask_bytes(folder: Path) -> bytes:
    path = folder / "seed.pt"
    embedding = torch.arange(16, dtype=torch.bfloat16)
    torch.save({"mask_token_id": 7, "embedding": embedding}, path)
    return path.read_bytes()


def damaged_header(data: bytes, rng: random.Random) -> bytes:
    """`data` with a hostile value somewhere in its JSON, and a header length that fits."""
    n_header = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n_header])
    for _ in range(rng.choice([1, 1, 2, 4])):
        name = rng.choice(list(header))
        match rng.randrange(6):
            case 0:
                header[name] = rng.choice(HOSTILE)
            case 1 if isinstance(header[name], dict) and header[name]:
                header[name][rng.choice(list(header[name]))] = rng.choice(HOSTILE)
            case 2 if isinstance(header[name], dict) and isinstance(
                header[name].get("shape"), list
            ):
                header[name]["shape"] = [*header[name]["shape"], rng.choice(HOSTILE)]
            case 3 if isinstance(header[name], dict) and "data_offsets" in header[name]:
                header[name]["data_offsets"] = [rng.randrange(300), rng.randrange(300)]
            case 4:
                header[str(rng.choice(HOSTILE))] = header.pop(name)
            case 5:
                header["copy"] = header[name]
        if not header:
            break
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + n_header :]


def one_line(error: FileError, path: Path) -> None:
    message = str(error)
    assert message.startswith(str(path)), message
    assert "\n" not in message and len(message) < 700, message
    message.encode()


def try_checkpoint(data: bytes, folder: Path) -> str:
    """ "refused" or "accepted"; fails when the reader does anything but these two."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    try:
        checkpoint = Checkpoint.open(folder)
    except FileError as error:
        one_line(error, folder)
        return "refused"
    with safe_open(path, "numpy") as theirs:
        assert set(theirs.keys()) == set(checkpoint.tensors)
        for name, entry in checkpoint.tensors.items():
            assert tuple(theirs.get_slice(name).get_shape()) == entry.shape
    for name, entry in checkpoint.tensors.items():
        try:
            rows = checkpoint.rows(name, 0, entry.shape[0] if entry.shape else 1)
            assert rows.size == entry.n_elements
        except FileError as error:
            one_line(error, folder)
    return "accepted"


def try_mask(data: bytes, folder: Path) -> str:
    """As `try_checkpoint`, for a mask embedding."""
    path = folder / "mask_embedding.pt"
    path.write_bytes(data)
    try:
        values = read_mask_embedding(path)
    except FileError as error:
        one_line(error, path)
        return "refused"
    assert values.ndim == 1
    return "accepted"


def run(count: int, seed: int, folder: Path) -> Counter[str]:
    """Try `count` damaged files; the numbers refused and accepted of each kind."""
    rng = random.Random(seed)
    weights, mask = checkpoint_bytes(folder), mask_bytes(folder)
    for path in folder.iterdir():
        path.unlink()
    end = 8 + int.from_bytes(weights[:8], "little")
    kinds: dict[str, Callable[[], str]] = {
        "bytes": lambda: try_checkpoint(damaged_bytes(weights, rng, end), folder),
        "header": lambda: try_checkpoint(damaged_header(weights, rng), folder),
        "mask": lambda: try_mask(damaged_bytes(mask, rng, len(mask)), folder),
    }
    found: Counter[str] = Counter()
    for index in range(count):
        kind = list(kinds)[index % len(kinds)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                found[f"{kind} {kinds[kind]()}"] += 1
            except SafetensorError as error:
                raise AssertionError(f"input {index} of seed {seed}: {error}") from error
    return found


if __name__ == "__main__":
    n_inputs = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as scratch:
        print(dict(run(n_inputs, first, Path(scratch))))
