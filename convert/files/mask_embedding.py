"""`mask_embedding.pt`: the vector that some drafters use for the target's mask token.

It is what `torch.save({"mask_token_id": int, "embedding": vector})` writes: a zip of a pickle and
the bytes of the vector. A pickle is a program. Here it can use the few operations that such a file
needs, and call nothing but the functions in `_GLOBALS`.
"""

import io
import pickle
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reading import fail, read_limited, shown

_FILE_LIMIT = 1 << 24  # bytes; the vector has some 20,000
_PICKLE_LIMIT = 1 << 12  # torch writes some 400; of a tuple nested much deeper, a hash would crash
_EXPECTED = "expected what torch.save({'mask_token_id': int, 'embedding': vector}) writes"

_OPERATIONS = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK"),
        *("BININT", "BININT1", "BININT2", "LONG1", "INT", "BINUNICODE", "SHORT_BINUNICODE"),
        *("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
        *("GLOBAL", "STACK_GLOBAL", "BINPERSID", "REDUCE"),
    }
)
_STORAGES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("f4"),
    "HalfStorage": np.dtype("f2"),
    "BFloat16Storage": np.dtype("u2"),
}


@dataclass(frozen=True)
class _Storage:
    kind: str
    key: str
    n_elements: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


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
            saved, storages = _members(archive)
            token_id, tensor = _contents(_unpickled(saved))
            if mask_token_id is not None and token_id != mask_token_id:
                fail(path, f"is for token {token_id}, the drafter's mask token is {mask_token_id}")
            return _values(tensor, storages, archive)
    except _FAULTS as error:
        fail(path, f"is not read: {error or type(error).__name__}; {_EXPECTED}")


class _Refused(Exception):
    """The archive or its pickle is not of the one form that is read."""


_FAULTS = (
    _Refused,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    OSError,
    struct.error,
    OverflowError,
    RuntimeError,  # an encrypted member; NotImplementedError, an unknown compression
)


def _members(archive: zipfile.ZipFile) -> tuple[bytes, dict[str, zipfile.ZipInfo]]:
    """The pickle, and the members beside it by their name in the archive's folder."""
    found: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        _, _, name = member.filename.partition("/")
        if name in found:
            raise _Refused(f"{shown(name)} occurs twice")
        found[name] = member
    if "data.pkl" not in found:
        raise _Refused("the archive holds no data.pkl")
    return _stored(archive, found["data.pkl"], _PICKLE_LIMIT), found


def _stored(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> bytes:
    # torch does not compress, and compressed data may unpack to any size
    if member.compress_type != zipfile.ZIP_STORED or member.file_size > limit:
        raise _Refused(f"{shown(member.filename)} is compressed or larger than {limit} bytes")
    return archive.read(member)


def _unpickled(saved: bytes) -> Any:
    """The value that the pickle `saved` describes: dicts, tuples, numbers, text and tensors."""
    for operation, argument, _ in pickletools.genops(saved):
        if operation.name not in _OPERATIONS:
            raise _Refused(f"its pickle uses the operation {operation.name}")
        if operation.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(saved):
            raise _Refused("its pickle is malformed")  # Python would claim memory up to that place
    return _Unpickler(io.BytesIO(saved)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise _Refused(f"its pickle would have Python import {shown(f'{module}.{name}')}")
        return _GLOBALS[module, name]

    def persistent_load(self, reference: Any) -> _Storage:
        match reference:
            case ("storage", str(kind), str(key), str(), int(n_elements)):
                if kind in _STORAGES and n_elements >= 0:
                    return _Storage(kind, key, n_elements)
        raise _Refused("its pickle refers to something that is no tensor's storage")


def _rebuilt(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    match storage, offset, shape, strides:
        case _Storage(), int(), tuple(), tuple():
            if all(type(size) is int and size >= 0 for size in (offset, *shape, *strides)):
                return _Tensor(storage, offset, shape, strides)
    raise _Refused("its pickle would have Python call something that rebuilds no tensor")


_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("collections", "OrderedDict"): lambda: {},
    **{("torch", kind): kind for kind in _STORAGES},
}


def _contents(value: object) -> tuple[int, _Tensor]:
    match value:
        case {"mask_token_id": int(token_id), "embedding": _Tensor() as tensor}:
            if len(tensor.shape) != 1 or tensor.strides != (1,):
                raise _Refused(f"its embedding has the shape {tensor.shape}, expected a vector")
            return token_id, tensor
    raise _Refused("it holds something else")


def _values(
    tensor: _Tensor, members: dict[str, zipfile.ZipInfo], archive: zipfile.ZipFile
) -> NDArray[np.float32]:
    storage, n_values = tensor.storage, tensor.shape[0]
    big = "byteorder" in members and _stored(archive, members["byteorder"], 16) == b"big"
    stored = _STORAGES[storage.kind].newbyteorder(">" if big else "<")
    data = _stored(archive, members[f"data/{storage.key}"], _FILE_LIMIT)
    if len(data) != storage.n_elements * stored.itemsize:
        raise _Refused(f"its storage has {len(data)} bytes for {storage.n_elements} values")
    if tensor.offset + n_values > storage.n_elements:
        raise _Refused(f"its embedding of {n_values} values is longer than its storage")
    values = np.frombuffer(data, stored)[tensor.offset : tensor.offset + n_values]
    if storage.kind == "BFloat16Storage":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
