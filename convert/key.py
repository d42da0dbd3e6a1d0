"""One metadata entry of a GGUF file, with the type that it is stored as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gguf import GGUFValueType

Value: TypeAlias = (
    int | float | bool | str | Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[str]
)
KeyKind: TypeAlias = Literal[
    "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64", "bool", "str",
    "arr_u8", "arr_i8", "arr_u16", "arr_i16", "arr_u32", "arr_i32", "arr_u64", "arr_i64",
    "arr_f32", "arr_f64", "arr_bool", "arr_str",
]  # fmt: skip

# the kinds of one value and of an array
KINDS: dict[GGUFValueType, tuple[KeyKind, KeyKind]] = {
    GGUFValueType.UINT8: ("u8", "arr_u8"),
    GGUFValueType.INT8: ("i8", "arr_i8"),
    GGUFValueType.UINT16: ("u16", "arr_u16"),
    GGUFValueType.INT16: ("i16", "arr_i16"),
    GGUFValueType.UINT32: ("u32", "arr_u32"),
    GGUFValueType.INT32: ("i32", "arr_i32"),
    GGUFValueType.UINT64: ("u64", "arr_u64"),
    GGUFValueType.INT64: ("i64", "arr_i64"),
    GGUFValueType.FLOAT32: ("f32", "arr_f32"),
    GGUFValueType.FLOAT64: ("f64", "arr_f64"),
    GGUFValueType.BOOL: ("bool", "arr_bool"),
    GGUFValueType.STRING: ("str", "arr_str"),
}
_STORED: dict[KeyKind, tuple[GGUFValueType, GGUFValueType | None]] = {
    **{one: (element, None) for element, (one, _) in KINDS.items()},
    **{many: (GGUFValueType.ARRAY, element) for element, (_, many) in KINDS.items()},
}


@dataclass(frozen=True)
class Key:
    """One key. Bytes of a string that are not UTF-8 are surrogates, as `surrogateescape` does."""

    name: str
    value: Value
    kind: KeyKind

    @property
    def types(self) -> tuple[GGUFValueType, GGUFValueType | None]:
        """GGUF's type of the value, and that of an array's elements (None: no array)."""
        return _STORED[self.kind]

    @property
    def type_name(self) -> str:
        """The stored type in words, such as "uint32" or "array of string"."""
        kind, element = self.types
        return kind.name.lower() if element is None else f"array of {element.name.lower()}"
