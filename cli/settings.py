"""The settings file and the environment: values of options that need not be typed each time.

The file is TOML. A key is the long name of an option. At the top it holds for each command that has
the option, in the table of a command for that one alone. An option on the command line comes first,
then its environment variable, then the file.
"""

import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dflash_local.errors import FileError
from dflash_local.text_file import read_toml

from .options import ENVIRONMENT, Option
from .plugins import MissingCommand, PluginGroup
from .user_files import CONFIG, settings_file

VARIABLES = {
    "DFLASH_LOCAL_CACHE": "the folder for what is measured once",
    "DFLASH_LOCAL_TUNED": "the folder for tuned drafters",
    "DFLASH_LOCAL_CALIBRATION_S": "seconds for measuring what drafting costs",
    "DFLASH_LOCAL_FEW_ROWS": "0 leaves all products to llama.cpp's kernels, for comparisons",
    CONFIG: "the settings file, in place of the usual one",
    "DFLASH_LOCAL_REGISTRY": "a file of your own pairs, by name",
    "DFLASH_LOCAL_LOG": "1 shows llama.cpp's messages, debug all of them",
    "NO_COLOR": "anything: no colours",
}
"""Environment variables that stand for no option."""

FROM_ELSEWHERE = (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
"""The sources of values that were not given for this call alone."""


def default_map(group: PluginGroup) -> dict[str, dict[str, Any]]:
    """The settings of the file by command and parameter, as click takes them; of plugins only if
    they are loaded, or the file has settings of theirs. Raises FileError for a file that cannot be
    understood, OSError."""
    path = settings_file()
    if not path.exists() and not os.environ.get(CONFIG):
        return {}
    found = read_toml(path)
    try:
        return _settings(path, found, group.commands)
    except FileError:
        return _settings(path, found, group.all_commands())


def _settings(
    path: Path, found: Mapping[str, Any], commands: Mapping[str, click.Command]
) -> dict[str, dict[str, Any]]:
    """Those of `found` for these commands. A command that is missing may have any."""
    options = {name: _options(command) for name, command in commands.items()}
    everywhere = {key for known in options.values() for key in known}
    tables = {
        name: table
        for name, table in found.items()
        if isinstance(table, dict) and name.replace("_", "-") not in everywhere
    }
    rest = {key: value for key, value in found.items() if key not in tables}
    try:
        general = _placed(f"{path}: ", rest, everywhere)
    except FileError as error:
        raise FileError(f"{error}{_of_plugins(commands, ', put it in a table')}") from None
    own = {}
    for name, table in tables.items():
        _check_known(f"{path}: [{name}]", name, options)
        if isinstance(commands[name], MissingCommand):
            continue
        own[name] = _placed(f"{path}: [{name}] ", table, options[name])
    settings = {}
    for name, known in options.items():
        usual = {key: value for key, value in general.items() if key in known and not known[key].of}
        settings[name] = {
            known[key].name or key: read_value(where, known[key], value)
            for key, (where, value) in {**usual, **own.get(name, {})}.items()
        }
    return settings


def read_value(where: str, option: Option, value: Any) -> Any:
    """A value of TOML as click takes it: what the command line would have, or a flag's bool.
    `where` is its place in errors. Raises FileError for what no command line could say."""
    if isinstance(value, dict) and option.metavar == "JSON":
        return json.dumps(value)
    takes_list = option.multiple or "..." in (option.metavar or "")
    parts = value if isinstance(value, list) and takes_list else [value]
    for part in parts:
        fits = option.is_flag if isinstance(part, bool) else isinstance(part, str | int | float)
        if not fits:
            kinds = "true nor false" if option.is_flag else "a text nor a number"
            told = str(part).lower() if isinstance(part, bool) else part
            raise FileError(f"{where}: {told} is neither {kinds}")
    if option.is_flag:
        return value
    texts = list(map(str, parts))
    return texts if option.multiple else ",".join(texts)


def unknown_variables(group: PluginGroup) -> Iterator[str]:
    """A line about each variable that looks like one of ours and is none."""
    given = [name for name in sorted(os.environ) if name.startswith(f"{ENVIRONMENT}_")]
    known = _variables(group.commands)
    if not known.issuperset(given):
        known = _variables(group.all_commands())
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            hint = _of_plugins(group.commands, ", it waits for them") or hint
            yield f"the environment variable {name} means nothing to this program{hint}"


def _variables(commands: Mapping[str, click.Command]) -> set[str]:
    own = (parameter.envvar for command in commands.values() for parameter in command.params)
    return {*VARIABLES, *(str(name) for name in own if name)}


def _of_plugins(commands: Mapping[str, click.Command], then: str) -> str:
    """A hint at a name that no command knows, where plugins are missing; else nothing."""
    missing = [name for name, each in commands.items() if isinstance(each, MissingCommand)]
    which = " and ".join(missing)
    return f"; if it is of {which}, which cannot be loaded here{then}" if missing else ""


def template(group: PluginGroup) -> str:
    """A settings file that sets nothing yet, and lists what it may set."""
    commands = group.all_commands()
    lines = [
        "# Settings of dflash-local: remove the # before a key, and give it a value. An option on",
        "# the command line comes first, then its environment variable, then this file.",
    ]
    shared = [
        key
        for name, command in commands.items()
        for key, option in _options(command).items()
        if not option.of and name not in group.plugins  # theirs go to their own tables
    ]
    general: dict[str, str] = {}
    tables: list[str] = []
    for name, command in commands.items():
        own = []
        for key, option in _options(command).items():
            line = f"# {key} =  # {option.help}"
            if shared.count(key) > 1 and not option.of:
                general.setdefault(key, line)
            else:
                own.append(line)
        tables += ["", f"# [{name}]", *own] if own else []
    return "\n".join([*lines, "", *general.values(), *tables]) + "\n"


def _options(command: click.Command) -> dict[str, Option]:
    return {each.long_name: each for each in command.params if isinstance(each, Option)}


def _placed(
    where: str, table: Mapping[str, Any], known: Collection[str]
) -> dict[str, tuple[str, Any]]:
    """The values of a table with their places, by the long names of options."""
    found = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        _check_known(where + key, name, known)
        found[name] = (where + key, value)
    return found


def _check_known(where: str, key: str, known: Collection[str]) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, list(known), 1)
    hint = f"did you mean {near[0]}?" if near else "`dflash-local -h` lists commands and options"
    raise FileError(f"{where} is no setting; {hint}")
