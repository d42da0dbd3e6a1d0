"""One metadata entry of a GGUF file, with the type that it is stored as."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import GGUFValueType

from dflash_local.gguf.file import GgufFile

_VERSION = 3  # of GGUF

Value: TypeAlias = (
    int | float | bool | str | Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[str]
)


@dataclass(frozen=True)
class Key:
    """One key. Bytes of a string that are not UTF-8 are surrogates, as `surrogateescape` does."""

    name: str
    value: Value
    kind: GGUFValueType
    """Of the value, or of each element of an array."""

    @classmethod
    def of(cls, name: str, value: Value) -> Key:
        """A key of the type that llama.cpp's converter gives such a value."""
        if isinstance(value, (list, tuple)):
            return cls(name, value, GGUFValueType.get_type(value[0]))
        kind = GGUFValueType.get_type(value)
        # whole numbers are signed in arrays only
        return cls(name, value, GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind)

    @classmethod
    def copied(cls, file: GgufFile, name: str) -> Key:
        stored = file.value_types[name].removeprefix("array of ")
        return cls(name, file.metadata[name], GGUFValueType[stored.upper()])

    @property
    def is_array(self) -> bool:
        return isinstance(self.value, (list, tuple))

    @property
    def stored(self) -> Any:
        """The value as it will be read back."""
        if self.kind == GGUFValueType.FLOAT32:
            return np.asarray(self.value, np.float32).tolist()
        return list(self.value) if isinstance(self.value, tuple) else self.value

    @property
    def type_name(self) -> str:
        """The stored type in words, such as "uint32" or "array of string"."""
        return f"{'array of ' if self.is_array else ''}{self.kind.name.lower()}"


def header(path: Path, keys: Collection[Key]) -> GgufFile:
    """A file of these keys, without tensors, as it would be read."""
    values = {key.name: key.stored for key in keys}
    return GgufFile(path, _VERSION, values, {key.name: key.type_name for key in keys}, {}, 0)
