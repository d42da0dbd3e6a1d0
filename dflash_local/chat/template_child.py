"""The child process that renders chat templates.

A template is a program, and the file that it comes from need not be trusted. jinja2's sandbox keeps
it away from files and processes. It does not stop it from running for ever or from filling the
memory, inside of one call in C too, where no other thread of the process can run. So it renders in
a process of its own, which `template` ends when the time is up.

It imports little, so as to start fast.
"""

import json
import signal
from collections.abc import Container, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from dflash_local.trial.child import bound_memory, die_quietly, say

_MOST_BYTES = 1 << 30
"""Of address space: eight times the text of the longest prompt, as Python objects."""
_ORPHAN_S = 120
"""After that it ends by itself: whoever should have ended it is gone."""
_alarm = getattr(signal, "alarm", lambda _: None)  # Windows has none


def main(request: dict[str, Any]) -> None:
    """Render the template `source` with `variables`; without these, only read it."""
    _set_limits()
    _alarm(_ORPHAN_S)
    try:
        sandbox, variables = _sandbox(request["source"]), request["variables"]
        try:
            say(done=True, text=variables and sandbox.text(variables, request["most"]))
        except Exception:
            # Some templates cannot do with a variable that is null, or join arguments as texts.
            with suppress(Exception):
                say(done=True, text=sandbox.text(_as_llama_server(variables), request["most"]))
                return
            raise
    except MemoryError:
        say(fault=f"it takes more than {_MOST_BYTES >> 20} MiB of memory")
    except Exception as error:  # a template is a program, and may fail in any way
        say(fault=_line(error))
    finally:
        _alarm(0)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, as transformers has it. Lists and objects of a template's
    own may be changed as well, which Kimi K2's does to count the calls of tools."""

    def __init__(self, source: str) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTags, loopcontrols],
            undefined=_Undefined,
        )
        self.globals.pop("lipsum")
        self.filters["tojson"] = _tojson
        # Nothing is escaped here, and jinja2's own `safe` would escape what is added to its text.
        self.filters["safe"] = str
        self._template = self.from_string(source)
        self._given: Container[int] = ()  # the ids of its lists and objects

    def text(self, variables: dict[str, Any], most: int) -> str:
        """The template's text, at most so many characters."""
        self._given = set(_containers(variables))
        ours = {
            "raise_exception": _raise,
            "strftime_now": lambda layout: datetime.now().strftime(layout),
        }
        texts, n = [], 0
        for part in self._template.generate({**variables, **ours}):
            n += len(part)
            if n > most:
                raise ValueError(f"it writes more than {most} characters")
            texts.append(part)
        return "".join(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (list, dict)) and id(obj) not in self._given:
            return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)


class _Undefined(jinja2.Undefined):
    """A value that a message or a tool does not have: no text where texts are joined, as
    llama-server has it: Command R+'s template adds descriptions that parameters may lack."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else self._fail_with_undefined_error()

    __radd__ = __add__


class _GenerationTags(Extension):
    """`{% generation %}` marks what a model is trained on, and means nothing else."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **layout: Any
) -> str:
    """`layout`: `separators`, `sort_keys`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=_listed, **layout)


def _listed(value: Any) -> list[Any]:
    """The results of filters such as `map`, as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _containers(value: Any) -> Iterator[int]:
    """The ids of all lists and objects in a value of JSON."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, (list, dict)):
            yield id(value)
            left += value.values() if isinstance(value, dict) else value


@lru_cache(1)
def _set_limits() -> None:
    die_quietly()
    bound_memory(_MOST_BYTES)


_sandbox = lru_cache(4)(Sandbox)


def _as_llama_server(variables: dict[str, Any]) -> dict[str, Any]:
    """The variables that are not null, with the arguments of calls as texts."""
    for message in variables["messages"]:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {name: value for name, value in variables.items() if value is not None}


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:1000] or type(error).__name__
    lineno = getattr(error, "lineno", None)
    return f"{text} (line {lineno} of the template)" if lineno else text
