"""A pair that has a name: what the registry says of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dflash_local.errors import FileError, InputError
from dflash_local.fit.architectures import MIXTURES
from dflash_local.gguf.drafter_spec import Family
from dflash_local.sampling.params import SamplingParams


@dataclass(frozen=True)
class Entry:
    """One table of the registry; `pairs.toml` says what its keys mean."""

    name: str
    drafter: str
    target: str = ""
    gguf: str | None = None
    package: str | None = None
    weights: str | None = None
    quant: str | None = None
    size: int | None = None
    architecture: str | None = None
    with_heads: str | None = None
    family: Family = "dflash"
    aliases: tuple[str, ...] = ()
    thinking: bool | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    thinking_sampling: Mapping[str, float] = field(default_factory=dict)
    no_thinking_sampling: Mapping[str, float] = field(default_factory=dict)
    answer_length: int | None = None
    training_length: int | None = None
    tokens_per_round: float | None = None
    notes: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it goes by."""
        return (self.name, *self.aliases)

    @property
    def packaged(self) -> Path | None:
        """The target's file, if the package of Python that brings it is installed."""
        try:
            files = metadata.files(self.package) if self.package else None
        except metadata.PackageNotFoundError:
            return None
        found = (Path(file.locate()) for file in files or () if file.suffix == ".gguf")
        return next((path for path in found if path.is_file()), None)

    def package_has(self, quant: str | None) -> bool:
        """Whether that package has the target in this quantisation; None is the usual one."""
        usual = self.quant or ""
        return self.package is not None and (quant or usual).casefold() == usual.casefold()

    @property
    def is_mixture(self) -> bool:
        """Whether the target is a mixture of experts, as its name or its architecture says."""
        return bool(re.search(r"-A\d+B", self.target)) or self.architecture in MIXTURES

    def sampling_for(self, thinking: bool | None) -> Mapping[str, float]:
        """The makers' advice for chats that ask for thinking, for none, or (None) for nothing."""
        special = self.no_thinking_sampling if thinking is False else self.thinking_sampling
        return special or self.sampling


def _toml_type(declared: Any) -> type:
    """The type in TOML of the values that a field takes."""
    of_origin: dict[Any, type] = {Mapping: dict, tuple: list, Literal: str}
    if (origin := get_origin(declared)) in of_origin:
        return of_origin[origin]
    found: type = declared if isinstance(declared, type) else get_args(declared)[0]
    return found


_KINDS = {each.name: _toml_type(each.type) for each in fields(Entry) if each.name != "name"}
_SAMPLING = {each.name for each in fields(SamplingParams)}


def read_entry(where: str, name: str, table: Any) -> Entry:
    """The table `name` of the registry file `where`. Raises FileError."""
    at = f"{where}: [{name}]"
    if not isinstance(table, dict) or "drafter" not in table:
        raise FileError(
            f"{at} has no drafter: name a hub repository or a file; a name with a dot stands in "
            "quotes"
        )
    for key, value in table.items():
        if key not in _KINDS:
            raise FileError(f"{at} {key}: no such key; the keys are {', '.join(_KINDS)}")
        if type(value) not in ((int, float) if _KINDS[key] is float else (_KINDS[key],)):
            raise FileError(f"{at} {key}: {value!r} is not of type {_KINDS[key].__name__}")
    for key in ("size", "answer_length", "training_length"):
        if table.get(key, 1) < 1:
            raise FileError(f"{at} {key}: {table[key]} is not 1 or more")
    for key in ("sampling", "thinking_sampling", "no_thinking_sampling"):
        unknown = table.get(key, {}).keys() - _SAMPLING
        if unknown:
            raise FileError(f"{at} {key}: {min(unknown)} is no sampling option")
        try:
            SamplingParams(**table.get(key, {})).validate(n_vocab=1)
        except InputError as error:
            raise FileError(f"{at} {key}: {error}") from None
    values = {**table, "aliases": tuple(map(str, table.get("aliases", ())))}
    for key in ("gguf", "with_heads", "drafter"):
        beside = Path(where).parent / table.get(key, "")
        if beside.is_file():
            values[key] = str(beside.absolute())
    return Entry(name=name, **{"target": name, **values})
