"""`mask_embedding.pt`: the vector that some drafters use for the target's mask token.

It is what `torch.save({"mask_token_id": int, "embedding": vector})` writes: a zip of a pickle and
the bytes of the vector. A pickle is a program. Here it can call nothing but the functions in
`_GLOBALS`.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .reading import fail, read_limited, shown, told

_FILE_LIMIT = 1 << 24  # bytes; the vector has some 20,000
_PICKLE_LIMIT = 1 << 12  # torch writes some 400; of a tuple nested much deeper, a hash would crash
_EXPECTED = "expected what torch.save({'mask_token_id': int, 'embedding': vector}) writes"
_STORAGES = {"FloatStorage": "f4", "HalfStorage": "f2", "BFloat16Storage": "u2"}


class _Tensor(NamedTuple):
    storage: tuple[str, str, str, str, int]
    """"storage", its type, its name in the archive, its device, its number of values."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): lambda *parts: _Tensor(*parts[:4]),
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("collections", "OrderedDict"): lambda: {},
    **{("torch", kind): kind for kind in _STORAGES},
}


class _Unpickler(pickle._Unpickler):  # in Python: the one in C would claim memory as a file says
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise ValueError(f"its pickle would have Python import {shown(f'{module}.{name}')}")
        return _GLOBALS[module, name]

    def persistent_load(self, reference: Any) -> Any:
        return reference


def read_mask_embedding(path: Path, *, mask_token_id: int | None = None) -> NDArray[np.float32]:
    """The vector in `path`, [hidden size], in float32.

    With `mask_token_id`, the file must be for this token. Raises FileError when the file is of
    another form, with the call that it would have made.
    """
    data = read_limited(path, _FILE_LIMIT)
    if not data.startswith(b"PK"):
        fail(path, f"no zip archive; torch's format before 1.6 is not read; {_EXPECTED}")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            token_id, values = _contents(archive)
    except Exception as error:  # pickle raises nearly anything
        fail(path, f"is not read: {told(error)}; {_EXPECTED}")
    if mask_token_id is not None and token_id != mask_token_id:
        fail(path, f"is for token {token_id}, the drafter's mask token is {mask_token_id}")
    return values


def _contents(archive: zipfile.ZipFile) -> tuple[int, NDArray[np.float32]]:
    """The token and its vector."""
    members = {each.filename.partition("/")[2]: each for each in archive.infolist()}

    def stored(name: str, limit: int) -> bytes:
        # torch does not compress, and compressed data may unpack to any size
        if members[name].compress_type != zipfile.ZIP_STORED or members[name].file_size > limit:
            raise ValueError(f"{shown(name)} is compressed or larger than {limit} bytes")
        return archive.read(members[name])

    match _Unpickler(io.BytesIO(stored("data.pkl", _PICKLE_LIMIT))).load():
        case {"mask_token_id": int(token_id), "embedding": _Tensor() as tensor}:
            pass
        case _:
            raise ValueError("it holds something else")
    if len(tensor.shape) != 1 or tensor.strides != (1,):
        raise ValueError(f"its embedding has the shape {tensor.shape}, expected a vector")
    _, kind, name, *_ = tensor.storage
    big = "byteorder" in members and stored("byteorder", 16) == b"big"
    whole = np.frombuffer(
        stored(f"data/{name}", _FILE_LIMIT), (">" if big else "<") + _STORAGES[kind]
    )
    values = whole[tensor.offset : tensor.offset + tensor.shape[0]]
    if len(values) != tensor.shape[0]:
        raise ValueError(f"its embedding of {tensor.shape[0]} values is longer than its storage")
    if kind == "BFloat16Storage":
        return token_id, (values.astype(np.uint32) << 16).view(np.float32)
    return token_id, values.astype(np.float32)
