"""Reads option values that click has no type for: each function returns a value or refuses it.

The name of a function is what help shows for the value, in capitals.
"""

import ipaddress
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import click

from dflash_local.fit.options import scaled_files
from dflash_local.server.models.keep_alive import keep_alive_s

MAX_INT = 2**31 - 1
"""llama.cpp takes its counts as 32-bit integers."""

MAX_BIAS = 1e6
"""Far beyond any logit; to ban a token for certain takes -inf."""


@contextmanager
def refused() -> Iterator[None]:
    """Let a ValueError, such as an InputError, refuse the value of an option."""
    try:
        yield
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


def parts(value: Any) -> list[str]:
    """Reads `CUDA0,CUDA1`."""
    return [part.strip() for part in str(value).split(",")]


def whole(
    low: int, high: int = MAX_INT, words: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Any], Any]:
    """Reads a whole number from `low` to `high`, both included, or a word for another value."""

    def n(value: Any) -> Any:
        if str(value) in words:
            return words[str(value)]
        try:
            given = int(value)
        except ValueError:
            given = low - 1
        if not low <= given <= high:
            expected = "".join(f"{word}, or " for word in words)
            expected += f"a whole number from {low} to {high}"
            raise click.BadParameter(f"{value!s} is not {expected}.")
        return given

    return n


def number(low: float, high: float, *, above: bool = False) -> Callable[[Any], float]:
    """Reads a number from `low` to `high`, with `above` only greater than `low`; refuses `nan`."""

    def x(value: Any) -> float:
        try:
            given = float(value)
        except ValueError:
            given = math.nan
        if not low <= given <= high or (above and given == low):
            since = "above" if above else "from"
            raise click.BadParameter(f"{value!s} is not a number {since} {low:g} to {high:g}.")
        return given

    return x


def whole_list(low: int, high: int) -> Callable[[Any], tuple[int, ...]]:
    """Reads `1,4,8`: whole numbers, each kept once; `8k` is 8192."""

    def read(value: Any) -> tuple[int, ...]:
        words = parts(str(value).lower())
        try:
            given = [int(w.removesuffix("k")) * (1024 if w.endswith("k") else 1) for w in words]
        except ValueError:
            given = [low - 1]
        if not all(low <= each <= high for each in given):
            raise click.BadParameter(
                f"{value!s} is not a list of whole numbers from {low} to {high}."
            )
        return tuple(dict.fromkeys(given))

    return read


def name_list(names: Sequence[str]) -> Callable[[Any], tuple[str, ...]]:
    """Reads `a,b`: some of these names, each kept once."""

    def read(value: Any) -> tuple[str, ...]:
        given = parts(value)
        if not set(given) <= set(names):
            raise click.BadParameter(f"{value!s} is not a list of some of {', '.join(names)}.")
        return tuple(dict.fromkeys(given))

    return read


def token_bias(value: Any) -> tuple[int, float]:
    """Reads `ID=BIAS`: a token id and what is added to its logit; `ID=-inf` bans the token."""
    token, _, bias = str(value).partition("=")
    try:
        pair = int(token), float(bias)
    except ValueError:
        pair = -1, math.nan
    if not (0 <= pair[0] <= MAX_INT and pair[1] <= MAX_BIAS):
        raise click.BadParameter(f"{value!s} is not ID=BIAS, such as 42=-1.5 or 42=-inf.")
    return pair


def shares(value: Any) -> list[float]:
    """Reads `3,1`: the share of the model that each device takes."""
    try:
        given = [*map(float, parts(value))]
    except ValueError:
        given = []
    if not all(0 <= part < math.inf for part in given) or sum(given) <= 0:
        raise click.BadParameter(f"{value!s} is not a list of shares, such as 3,1.")
    return given


def overrides(value: Any) -> dict[str, str]:
    """Reads `REGEX=DEVICE,REGEX=DEVICE`; a pattern may have commas and signs of equality."""
    from dflash_local.fit.overrides import check_overrides

    if not re.fullmatch(r"(?:.+?=[^=,]+(?:,|$))+", str(value)):
        raise click.BadParameter(f"{value!s} is not REGEX=DEVICE, such as ffn_.*_exps=CPU.")
    given = dict(re.findall(r"(.+?)=([^=,]+)(?:,|$)", str(value)))
    with refused():
        check_overrides(given)
    return given


def file_keys(value: Any) -> dict[str, int | float | bool | str]:
    """Reads `KEY=TYPE:VALUE,KEY=TYPE:VALUE`."""
    read: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "bool": {"true": True, "false": False}.__getitem__,
        "str": str,
    }
    found = {}
    for part in str(value).split(","):
        key, _, typed = part.partition("=")
        kind, _, text = typed.partition(":")
        try:
            found[key] = read[kind](text)
        except (KeyError, ValueError):
            raise click.BadParameter(
                f"{part} is not KEY=TYPE:VALUE, such as qwen3.context_length=int:8192."
            ) from None
    return found


def places(value: Any) -> list[str]:
    """Reads `HOST:PORT,HOST:PORT`: where workers are."""
    from dflash_local.llama.workers import place

    with refused():
        for each in parts(value):
            place(each)
    return parts(value)


def scaled(value: Any) -> list[tuple[str, float]]:
    """Reads `FILE,FILE:SCALE`: adapters and how strongly they act."""
    with refused():
        return list(scaled_files("the adapter", parts(value)))


def json_object(value: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise click.BadParameter(f"{value!s} is not JSON ({error}).") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter(f'{value!s} is not an object, such as {{"key": true}}.')
    return parsed


def idle_time(value: Any) -> float:
    """Reads how long an idle model stays loaded, in seconds: `5m`, `300`, `-1` for ever."""
    with refused():
        return keep_alive_s(value)


def api_key(value: Any) -> str:
    """Reads a key: one word that an HTTP header can hold."""
    if not re.fullmatch("[!-~]{1,1024}", str(value)):
        raise click.BadParameter(
            "a key is one word of ASCII letters, digits and signs, 1024 at most."
        )
    return str(value)


def web_origin(value: Any) -> str:
    """Reads `https://chat.example:8443`, as browsers write an origin, or `*` for all."""
    origin = str(value).lower()
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
        raise click.BadParameter(
            f"{value!s} is not an origin: give scheme and host, and the port if it is not the "
            "usual one, without a path, such as https://chat.example."
        )
    return origin


def host_name(value: Any) -> str:
    """Reads the name or the address of a host, without a port, or the path of a UNIX socket."""
    if str(value).endswith(".sock"):
        return str(value)
    name = str(value).lower().removeprefix("[").removesuffix("]")
    if not re.fullmatch("[a-z0-9_.-]+", name):
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            raise click.BadParameter(
                f"{value!s} is not a host: give a name or an address, without scheme and port."
            ) from None
    return name


def url_prefix(value: Any) -> str:
    """Reads `/llm`: the beginning of paths."""
    if not re.fullmatch(r"(/[\w.~-]+)+", str(value)):
        raise click.BadParameter(f"{value!s} is no beginning of paths, such as /llm.")
    return str(value)


def utf8_text(value: Any) -> str:
    """Reads a text. Bytes that the locale cannot decode arrive as surrogates; they may be UTF-8."""
    text = str(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError:
            raise click.BadParameter("the text is not UTF-8: convert it first.") from None
    return text


class WholeText(click.types.StringParamType):
    """A text. The environment variable of a repeatable option holds one text, spaces included."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = utf8_text(super().convert(value, param, ctx))
        if not text:
            self.fail("the text is empty.", param, ctx)
        return text

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]
