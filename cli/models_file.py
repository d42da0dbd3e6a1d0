"""The models of --model and --models: their names, files and settings.

The file is TOML with a table for each model. `target` and `draft` are paths relative to the file's
folder, or names as --target takes them, and the other keys are options of the command, with _ or -
between their words.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from dflash_local.errors import FileError, InputError
from dflash_local.fit.options import WORDS
from dflash_local.text_file import read_toml

from .options import FILES, READABLE, Option
from .settings import read_value
from .values import refused

_MOST_NAME = 256


@dataclass(frozen=True)
class NamedModel:
    """`settings` are values of options, by the names of the command's parameters."""

    name: str
    target: Path | str
    """A file or folder that is there, or what else --target takes."""
    draft: Path | str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def named_model(value: Any) -> NamedModel:
    """Reads `NAME=TARGET` or `NAME=TARGET,DRAFT`, as --model has it."""
    name, equals, files = str(value).partition("=")
    target, comma, draft = files.partition(",")
    if not (equals and target and (draft or not comma)):
        raise click.BadParameter(
            f"{value!s} is not NAME=TARGET or NAME=TARGET,DRAFT, such as qwen=qwen3-8b-q4.gguf; "
            "a single model is --target."
        )
    _check_name(name)
    return NamedModel(name, _target(Path(), target), _draft(Path(), draft) if draft else None)


def read_models(path: Path, options: Iterable[Option]) -> list[NamedModel]:
    """The models of a file; `options` are those that it may set. Raises FileError, one line."""
    tables = read_toml(path)
    if not tables:
        raise FileError(f"{path} names no model: begin a table with [NAME] for each")
    keys = {option.long_name.replace("-", "_"): option for option in (*FILES, *options)}
    return [_read_model(path, name, table, keys) for name, table in tables.items()]


def check_names(models: Iterable[NamedModel]) -> None:
    """Refuse two models of one name. Raises InputError."""
    seen = set()
    for model in models:
        if model.name in seen:
            raise InputError(f"two models are named {model.name!r}: give each a name of its own")
        seen.add(model.name)


def _read_model(path: Path, name: str, table: Any, keys: Mapping[str, Option]) -> NamedModel:
    where = f"{path}: [{name}]"
    if not isinstance(table, dict):
        raise FileError(f"{path}: {name} is not in a table: begin each model with [NAME]")
    files: dict[str, Path | str] = {}
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            raise FileError(
                f"{where} has a table {key} inside: put a name with a dot in quotes, as in "
                f'["{name}.{key}"]'
            )
        try:
            option = keys.get(key.replace("-", "_"))
            if option is None:
                raise click.BadParameter(f"no such setting; the settings are {', '.join(keys)}.")
            given = read_value(f"{where} {key}", option, value)
            if key in ("target", "draft"):
                place = _target if key == "target" else _draft
                files[key] = place(path.parent, given)
            else:
                settings[option.name or key] = option.type(given)
        except click.BadParameter as error:
            raise FileError(f"{where} {key}: {error.message.removesuffix('.')}") from None
    if "target" not in files:
        raise FileError(f"{where} has no target: name its GGUF file")
    try:
        _check_name(name)
    except click.BadParameter as error:
        raise FileError(f"{where}: {error.message.removesuffix('.')}") from None
    return NamedModel(name, files["target"], files.get("draft"), settings)


def _check_name(name: str) -> None:
    if not name or name != name.strip() or len(name) > _MOST_NAME or not name.isprintable():
        raise click.BadParameter(
            f"{name[:40]!r} cannot be a model's name: give at most {_MOST_NAME} characters, and no "
            "spaces around them."
        )


def _target(folder: Path, given: str) -> Path | str:
    """As `_place`, but a folder must hold exactly one model."""
    from dflash_local.pairs.find import find_target

    place = _place(folder, given)
    if isinstance(place, Path) and place.is_dir():
        with refused():
            find_target(place)
    return place


def _draft(folder: Path, given: str) -> Path | str:
    """As `_place`, or a word in place of a drafter."""
    return given if given in WORDS else _place(folder, given)


def _place(folder: Path, given: str) -> Path | str:
    """The file or folder `given`, relative to `folder`, or a name. Raises click.BadParameter for
    what is neither, and for a file that cannot be read."""
    from dflash_local.pairs.address import read_address

    path = folder / os.path.expanduser(given)
    if path.is_dir():
        return path
    if path.exists() or given.endswith(".gguf"):
        READABLE.convert(str(path), None, None)
        return path
    with refused():
        read_address(given)
    return given
