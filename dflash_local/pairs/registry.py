"""The registry of pairs: the file in this package, and one of the user's own."""

import difflib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from dflash_local.errors import InputError
from dflash_local.pairs.entry import Entry, read_entry
from dflash_local.text_file import read_toml

ENVIRONMENT = "DFLASH_LOCAL_REGISTRY"
"""Names a file of the user's own, with the keys of `pairs.toml`."""

USUAL = "smollm2-135m"
"""The pair where none is named: its drafter lies in this package."""

_OWN = Path(__file__).with_name("pairs.toml")


def entries() -> tuple[Entry, ...]:
    """All pairs, in the order of the files. Raises InputError for a file that is not right."""
    return _entries(os.environ.get(ENVIRONMENT))


def own_entries() -> tuple[Entry, ...]:
    """The pairs that this package knows, without the user's."""
    return _entries(None)


@cache
def _entries(more: str | None) -> tuple[Entry, ...]:
    found = {entry.name: entry for entry in read(_OWN)}
    if more:
        found |= {entry.name: entry for entry in read(Path(os.path.expanduser(more)))}
    return tuple(found.values())


def read(path: Path) -> list[Entry]:
    """The pairs of one file. Raises InputError."""
    try:
        tables = read_toml(path)
    except OSError as error:
        raise InputError(f"{path}: the registry cannot be read: {error.strerror}") from None
    return [read_entry(str(path), name, table) for name, table in tables.items()]


def named(text: str) -> tuple[Entry, str | None] | None:
    """The pair of that name, and the quantisation after the last colon, as in
    `qwen3-8b:Q8_0`. None if there is no such name."""
    wanted = text.casefold()
    for name, quant in ((wanted, None), (wanted.rpartition(":")[0], text.rpartition(":")[2])):
        for entry in entries():
            if name and name in map(str.casefold, entry.names):
                return entry, quant
    return None


def hint(text: str, others: Iterable[str] = ()) -> str:
    """A hint in place of an unknown name: names of the registry and of `others` like it."""
    known = {name: entry.name for entry in entries() for name in entry.names}
    known |= {name.casefold(): name for name in others}
    found = difflib.get_close_matches(text.casefold(), known, 6, 0.5)
    near = list(dict.fromkeys(known[name] for name in found))[:3]
    return f"did you mean {' or '.join(near)}?" if near else "`dflash-local list` has the names"


def of_target(place: str) -> Entry | None:
    """The first pair whose target comes from this repository, or is this file."""
    return next((entry for entry in entries() if _is_target(entry, place)), None)


def of_weights(place: str) -> Entry | None:
    """The first pair the weights of whose target are in this repository, as safetensors."""
    return next((entry for entry in entries() if _same(entry.weights, place)), None)


def of_drafter(place: str) -> Entry | None:
    """The pair whose drafter comes from this repository, or is this file."""
    return next((entry for entry in entries() if _same(entry.drafter, place)), None)


def _is_target(entry: Entry, place: str) -> bool:
    packaged = entry.packaged
    return _same(entry.gguf, place) or (packaged is not None and _same(str(packaged), place))


def _same(one: str | None, other: str) -> bool:
    if one is None:
        return False
    file, given = Path(os.path.expanduser(one)), Path(other)
    is_one_file = file.is_file() and given.is_file() and file.samefile(given)
    return is_one_file or one.casefold() == other.casefold()
