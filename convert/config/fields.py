"""The fields of a drafter's `config.json`, read with their types checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from dflash_local.errors import FileError

T = TypeVar("T", bool, str, "dict[str, Any]")

_SHOWN = 60  # characters of a wrong value that a message repeats


def shown(value: object) -> str:
    """`value` for a message: in one line, not long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def refuse(field: str, value: object, expected: str) -> NoReturn:
    """Raise FileError: `field` of config.json is `value`, expected `expected`."""
    raise FileError(f"config.json: {field} is {shown(value)}, expected {expected}")


@dataclass(frozen=True)
class Fields:
    """One JSON object of the config. A null counts as left out, as in `transformers`."""

    values: Mapping[str, Any]
    prefix: str = ""  # "dflash_config." for the nested object

    def raw(self, name: str) -> Any:
        return self.values.get(name)

    def refuse(self, name: str, expected: str) -> NoReturn:
        refuse(self.prefix + name, self.raw(name), expected)

    def missing(self, name: str, expected: str) -> NoReturn:
        raise FileError(f"config.json: {self.prefix}{name} is missing, expected {expected}")

    def integer(self, name: str, low: int = 1, high: int = (1 << 31) - 1) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def need_integer(self, name: str, low: int = 1, high: int = (1 << 31) - 1) -> int:
        value = self.integer(name, low, high)
        if value is None:
            self.missing(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, *, positive: bool = True) -> float | None:
        """A finite number that a 32-bit float can hold."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, "a number")
        if abs(value) > 1e38 or not math.isfinite(value) or (positive and value < 1e-38):
            self.refuse(name, "a finite number" + (" above 0" if positive else ""))
        return float(value)

    def boolean(self, name: str) -> bool | None:
        return self._typed(name, bool, "true or false")

    def string(self, name: str) -> str | None:
        return self._typed(name, str, "a string")

    def strings(self, name: str) -> list[str] | None:
        return self._list(name, lambda item: isinstance(item, str), "a list of strings")

    def integers(self, name: str, low: int = 0) -> list[int] | None:
        def fits(item: Any) -> bool:
            return type(item) is int and low <= item < 1 << 31

        return self._list(name, fits, f"a list of whole numbers from {low}")

    def object(self, name: str) -> Fields | None:
        value = self._typed(name, dict, "a JSON object")
        return None if value is None else Fields(value, f"{self.prefix}{name}.")

    def _list(self, name: str, fits: Callable[[Any], bool], expected: str) -> list[Any] | None:
        value = self.raw(name)
        if value is not None and not (isinstance(value, list) and all(map(fits, value))):
            self.refuse(name, expected)
        return value

    def _typed(self, name: str, kind: type[T], expected: str) -> T | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, kind):
            self.refuse(name, expected)
        return value

    def only(self, known: Collection[str], what: str) -> None:
        """Raise FileError at the first field that is set and not in `known`."""
        for name, value in self.values.items():
            if name not in known and value is not None:
                self.refuse(name, f"only fields of {what} that llama.cpp's drafters know")


def stating(name: str, *places: Fields) -> Fields:
    """The first of `places` that states the field `name`; the last, if none does."""
    return next((place for place in places if place.raw(name) is not None), places[-1])
