"""jinja2's immutable sandbox, with bounds on the time and the memory that a template takes.

A template is a program, and the file that it comes from need not be trusted. jinja2's sandbox keeps
it away from files and processes, but does not stop it from running for ever or filling the memory.
So we change the program before it is compiled. Each turn of a loop and each call of a macro checks
the clock. Each expression that is written counts towards the length of the prompt. Everything that
makes texts longer (`*`, `+`, `~`, `%`, `replace`, `center`, ...) checks the length first.

This costs a tenth of a microsecond a turn, works in any thread, and needs no process of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dflash_local.llama import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)

# isort: split
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

MAX_SECONDS = 2.0
MAX_CHARACTERS = 16 << 20
"""Of a prompt, and of every text that is made on the way to it: more than any context holds."""
_MAX_NUMBER = 100_000
"""Of widths, counts and the like in the arguments of filters and methods; also `range`'s bound."""
_MAX_BITS = 4096
_MADE_PER_WRITTEN = 16
"""All texts on the way together may be this many times longer than the longest prompt: templates
put texts together piece by piece."""
_WIDE = re.compile(r"[0-9]{6}|\*")
"""In a format: `%99999999d`, `{:99999999}`, `%*d`."""


class _Spent:
    """What one rendering has used so far."""

    def __init__(self, max_seconds: float, max_characters: int) -> None:
        self._max_seconds = max_seconds
        self._deadline = time.monotonic() + max_seconds
        self._max_characters = max_characters
        self._n_written = 0
        self._n_made = 0

    def turn(self) -> None:
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it takes longer than {self._max_seconds:g} s")

    def write(self, n: int) -> None:
        self._n_written += n
        self.fit(self._n_written)

    def make(self, n: int) -> None:
        self.fit(n)
        self._n_made += n
        self.fit(self._n_made // _MADE_PER_WRITTEN)

    def fit(self, n: int) -> None:
        if n > self._max_characters:
            raise SecurityError(f"it writes more than {self._max_characters} characters")


_spent: ContextVar[_Spent] = ContextVar("_spent")


@contextmanager
def bounded(max_seconds: float, max_characters: int) -> Iterator[None]:
    """Renders the templates of this thread within these bounds."""
    token = _spent.set(_Spent(max_seconds, max_characters))
    try:
        yield
    finally:
        _spent.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, as transformers has it; render within `bounded`."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Jinja2ChatFormatter.IgnoreGenerationTags, loopcontrols],
        )
        self.globals.pop("lipsum")
        self.filters["tojson"] = Jinja2ChatFormatter.tojson
        for name, function in self.filters.items():
            self.filters[name] = _checked(name, function)
        self.filters.update({"_turn": _turn, "_write": _write, "_concat": _concat})

    def from_source(self, source: str) -> jinja2.Template:
        """A template whose loops, macros and texts are bounded."""
        program = _AddChecks().visit(self.parse(source))
        program.set_environment(self)
        return self.from_string(program)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps `format`.
        text = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(text, str) and not isinstance(obj, type):
            args = tuple(_check(getattr(obj, "__name__", "format"), (text, *args), kwargs))[1:]
        return super().call(context, obj, *args, **kwargs)


class _AddChecks(NodeTransformer):
    """Puts the checks into a template's program."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, _statement("_turn", node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, _statement("_turn", node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        self.generic_visit(node)
        node.body.insert(0, _statement("_turn", node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_filter("_write", part) for part in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter("_concat", nodes.List(node.nodes, lineno=node.lineno))


def _filter(name: str, node: nodes.Expr) -> nodes.Filter:
    if isinstance(node, nodes.TemplateData):
        node = nodes.Const(node.data, lineno=node.lineno)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _statement(name: str, lineno: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(name, nodes.Const(None, lineno=lineno)), lineno=lineno)


# Filters that take the context are not computed while a template is compiled.


@jinja2.pass_context
def _turn(_context: Context, _value: None) -> None:
    _spent.get().turn()


@jinja2.pass_context
def _write(_context: Context, value: Any) -> str:
    text = _text(value)
    _spent.get().write(len(text))
    return text


@jinja2.pass_context
def _concat(_context: Context, values: list[Any]) -> str:
    texts = [_text(value) for value in values]
    _spent.get().make(sum(map(len, texts)))
    return "".join(texts)


def _text(value: Any) -> str:
    """`str(value)`, unless that is too long."""
    if not isinstance(value, (str, Undefined)):
        _spent.get().make(_size(value))
    return str(value)


def _size(value: Any) -> int:
    """About how many characters a value is as text; counting ends when it is too many."""
    spent, n, n_parts, left = _spent.get(), 0, 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            n += len(part)
        elif isinstance(part, Mapping):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, set, frozenset)):
            left += part
        n_parts += 1
        if n_parts % 1024 == 0:
            spent.turn()
            spent.fit(n + n_parts)
    return n + n_parts


def _checked(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments first."""
    n_skipped = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return filter_(*args[:n_skipped], *_check(name, args[n_skipped:], kwargs), **kwargs)

    return checked


def _check(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Refuse a filter or a text's method whose result may be too long; `args` begin with the value.

    Returns the arguments to call it with: those that can be read only once become lists.
    """
    if not args:
        return args
    value, *rest = args
    spent = _spent.get()
    spent.turn()
    if name == "translate":
        raise SecurityError("a chat template has no use for translate")
    for given in (*rest, *kwargs.values()):
        if isinstance(given, int) and abs(given) > _MAX_NUMBER:
            raise SecurityError(f"{name} of {given} is too big")
    if name == "join":
        return _check_join(args, kwargs)
    if not isinstance(value, str):
        if name == "tojson":
            spent.make(_size(value))
        if name not in _WRITES:
            return args
        value = _text(value)
    if name in ("format", "format_map"):
        _check_format(value, (rest, kwargs))
    elif name in ("center", "ljust", "rjust", "zfill", "indent", "expandtabs", "wordwrap"):
        added = sum(_length(given) for given in (*rest, *kwargs.values()))
        n_places = 1 + value.count("\n") + value.count("\t")
        spent.make(len(value) + added * (len(value) if name == "wordwrap" else n_places))
    elif name == "replace" and len(rest) >= 2:
        old, new = _text(rest[0]), _text(rest[1])
        spent.make(len(value) + (value.count(old) if old else len(value) + 1) * len(new))
    return args


_WRITES = frozenset(
    {"string", "pprint", "upper", "lower", "title", "capitalize", "escape", "e", "forceescape"}
    | {"trim", "striptags", "urlencode", "urlize", "replace", "center", "indent"}
    | {"format", "wordcount", "truncate", "wordwrap", "xmlattr"}
)
"""Filters that make a text of any value."""


def _check_join(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """`parts | join(between)` and `between.join(parts)`."""
    parts_at = 1 if isinstance(args[0], str) and len(args) > 1 and not kwargs else 0
    given = list(args)
    if not isinstance(given[parts_at], (str, Mapping, Sequence)):
        try:
            given[parts_at] = list(given[parts_at])
        except TypeError:
            return args
    n = sum(_length(other) for other in (*given, *kwargs.values()) if isinstance(other, str))
    parts = given[parts_at]
    _spent.get().make(_size(parts) + n * len(parts))
    return given


def _check_operation(operator: str, left: Any, right: Any) -> None:
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "%" and isinstance(left, str):
        _check_format(left, right)
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _spent.get().make(len(left) + len(right))
    elif operator == "*" and not numbers:
        _spent.get().make(_length(left) * _length(right))
    elif operator in ("*", "**") and numbers:
        n_bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length()
        if n_bits + right.bit_length() > _MAX_BITS:
            raise SecurityError("a number is too big")


def _check_format(text: str, values: Any) -> None:
    if _WIDE.search(text):
        raise SecurityError("a width in a format is too big")
    # Each place takes one of the values, perhaps the longest.
    n_places = text.count("%") + text.count("{")
    _spent.get().make(len(text) + n_places * (_size(values) + _MAX_NUMBER // 10))


def _length(value: Any) -> int:
    if isinstance(value, int):
        return max(0, value)
    return len(value) if isinstance(value, Sized) else 1
