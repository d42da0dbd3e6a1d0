"""The header of a safetensors file: where its tensors are.

The safetensors package checks all of it, but tells no places, and gives no BF16 without PyTorch.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .reading import fail, regular_size, told, unreadable


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor. `shape` is in the checkpoint's order, the extent of a row last."""

    name: str
    dtype: str
    """As the file names it: "F32", "F16", "BF16", "I64", ..."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """First byte, counted from the start of the file."""
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """The product of `shape`; 1 for a scalar."""
        return math.prod(self.shape)


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the safetensors file at `path`. Raises FileError for a malformed one.

    Each tensor has as many bytes as its dtype and shape say, and together they fill the file.
    """
    regular_size(path)
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix == b"version ":
                fail(path, "a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            with safe_open(path, framework="np"):
                start = 8 + int.from_bytes(prefix, "little")
                header = json.loads(file.read(start - 8))
    except SafetensorError as error:
        fail(path, f"no safetensors file, or a damaged one: {told(error)}; fetch it again")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    header.pop("__metadata__", None)
    return {
        name: TensorEntry(name, raw["dtype"], tuple(raw["shape"]), path, start + begin, end - begin)
        for name, raw in header.items()
        for begin, end in [raw["data_offsets"]]
    }
