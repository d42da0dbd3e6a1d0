"""The options of requests that `/set` shows and changes in a conversation."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dflash_local.errors import InputError

from . import options as shared
from .options import Option

if TYPE_CHECKING:
    from dflash_local import Model

_OPTIONS = (
    shared.max_tokens(),
    *shared.SAMPLING,
    *shared.ENDING,
    shared.THINKING,
    *shared.REASONING_BUDGET,
)
_SWITCH = {"on": True, "true": True, "off": False, "false": False}
_USUAL = "default"


def option_lines(values: Mapping[str, Any], model: Model, answer_length: int) -> list[str]:
    """Each option and its value; those that were not set have what holds then."""
    usual = {
        **model.chat_sampling(None),
        "max_tokens": answer_length,
        "draft_width": model.draft_width,
    }
    width = max(len(each.long_name) for each in _OPTIONS) + 2
    lines = []
    for option in _OPTIONS:
        value = values.get(str(option.name))
        if value in (None, ()):
            known = option.name in usual
            value = f"{usual[str(option.name)]} ({_USUAL})" if known else _USUAL
        lines.append(f"{option.long_name:{width}s}{value}")
    return lines


def set_option(values: dict[str, Any], text: str) -> str:
    """Take `NAME VALUE` into the values of the command; what was set, in words. Raises
    InputError."""
    name, _, value = text.replace("=", " ", 1).partition(" ")
    option, value = _named(name), value.strip()
    assert option.name is not None
    if not value:
        raise InputError(f"/set {option.long_name} needs a value: {option.help}")
    if value == _USUAL:
        values[option.name] = () if option.multiple else None
        return f"{option.long_name} is as usual again"
    found = _read(option, value)
    values[option.name] = (found,) if option.multiple else found
    return f"{option.long_name} is {value}"


def option_names() -> dict[str, Option]:
    """All names of the options, with - between words."""
    return {name.lstrip("-"): each for each in _OPTIONS for name in each.opts}


def _named(text: str) -> Option:
    name = text.lstrip("-").replace("_", "-").lower()
    known = option_names()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "/set alone lists them"
    raise InputError(f"no option {text}; {hint}")


def _read(option: Option, value: str) -> Any:
    if option.is_bool_flag:
        if value.lower() not in _SWITCH:
            raise InputError(f"{option.long_name} is on or off, not {value}")
        return _SWITCH[value.lower()]
    try:
        return option.type(value, option, None)
    except click.BadParameter as error:
        raise InputError(f"{option.long_name}: {error.message.removesuffix('.')}") from None
