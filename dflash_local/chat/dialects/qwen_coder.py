"""Qwen3-Coder's way: calls in a markup of functions and parameters. Qwen3.5 reasons as well.

```
<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
```

Formats: the chat templates of Qwen3-Coder and Qwen3.5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.dialects.hermes import CLOSE, OPEN
from dflash_local.chat.dialects.plain import Plain
from dflash_local.chat.lark import any_of, json_rule, literal, mark
from dflash_local.chat.parsing.json_reader import State
from dflash_local.chat.parsing.marks import held
from dflash_local.chat.parsing.tagged_calls import TaggedCallParser
from dflash_local.chat.tool import Tool
from dflash_local.sampling.json_schema import referenced

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_PARAMETER = "</parameter>"
_VALUE_ENDS = (f"\n{_END_PARAMETER}", _END_PARAMETER)
# The closing mark of the call stands in for a forgotten end of the function.
_ENDS = ("</function>", "</tool_call>")
# Python's words, which the templates show the models for values of the last turn.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
# A bound on the length of a text that a grammar counts.
_MAX_LENGTH = 100_000
_ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
# Schemas may refer to themselves. Deeper than this, every type is allowed.
_DEEPEST_SCHEMA = 16


@dataclass(frozen=True)
class QwenCoder(Plain):
    """`thinking`: the model may reason between `<think>` and `</think>` first.

    In grammars, bounds on texts other than their length and a list of values are not enforced.
    """

    name: ClassVar[str] = "qwen-coder"

    @staticmethod
    def _is_written_by(template: str) -> bool:
        return all(part in template for part in (OPEN, _FUNCTION, _PARAMETER))

    def _answer_parser(self, tools: Sequence[Tool]) -> Parser:
        named = {tool.name: tool for tool in tools}
        # Models of this family now and then forget the outer mark.
        openings = {OPEN: False, _FUNCTION: True}
        return TaggedCallParser(openings, CLOSE, lambda: MarkupCallReader(named))

    def _call_rules(self, tools: Sequence[Tool], is_token: IsToken) -> list[str]:
        rules = [
            f"call: {mark(OPEN, is_token)} {literal(chr(10))} function {mark(CLOSE, is_token)}",
            f"function: {any_of([f'function{i}' for i in range(len(tools))])}",
        ]
        for i, tool in enumerate(tools):
            rules += _function_rules(i, tool)
        return rules


def _function_rules(i: int, tool: Tool) -> list[str]:
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required") or ()
    parts, rules = [], []
    for k, (key, schema) in enumerate((properties or {}).items()):
        parts.append(f"parameter{i}x{k}{'' if key in required else '?'}")
        begin = literal(f"{_PARAMETER}{key}>\n")
        rules.append(f"parameter{i}x{k}: {begin} value{i}x{k}")
        rules += _value_rules(f"value{i}x{k}", schema, tool.parameters)
    body = " ".join([literal(f"{_FUNCTION}{tool.name}>\n"), *parts, literal("</function>\n")])
    return [f"function{i}: {body}", *rules]


def _value_rules(name: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """A parameter's value and its end."""
    end = literal("\n</parameter>\n")
    if "string" not in _json_types(schema, root):
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return [f"{name}: json_{name} {end}", json_rule(f"json_{name}", {**shared, **schema})]
    texts = _texts(schema)
    if texts:
        return [f"{name}: ({any_of([literal(text) for text in texts])}) {end}"]
    low, high = _lengths(schema)
    return [rf"{name}[lazy]: /(.|\n){{{low},{high}}}\n<\/parameter>\n/"]


def _texts(schema: Any) -> list[str]:
    """The texts that a schema lists, if it lists any and nothing else."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return []
    return values


def _lengths(schema: Any) -> tuple[int, int | str]:
    """Fewest and most characters of a text, as a regular expression writes them."""
    if not isinstance(schema, Mapping):
        return 0, ""
    low, high = schema.get("minLength"), schema.get("maxLength")
    return (
        low if isinstance(low, int) and 0 <= low <= _MAX_LENGTH else 0,
        high if isinstance(high, int) and 0 <= high <= _MAX_LENGTH else "",
    )


class _MarkupPlace(Enum):
    FUNCTION = auto()
    NAME = auto()
    PARAMETER_OR_END = auto()
    KEY = auto()
    VALUE = auto()
    VALUE_END = auto()


class MarkupCallReader:
    """Reads one call in the markup, and writes its arguments as JSON.

    `tools` are those that may be called, by name.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.state = State.READING
        self._tools = tools
        self._at = _MarkupPlace.FUNCTION
        self._begun = ""
        """What was read of the present mark, name, key or end of a value."""
        self._tool: Tool | None = None
        self._certain = False
        self._n_arguments = 0
        self._value = ""
        """What of the value may still turn out to be its end."""
        self._kept = ""
        self._is_first = True
        self._types = _ALL_TYPES
        self._streams = False
        """Whether the value is a text, which needs no end to be written as JSON."""
        self._arguments: list[str] = []

    @property
    def name(self) -> str | None:
        return self._tool.name if self._tool and self._certain else None

    def take(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, text: str, at: int = 0) -> int:
        while at < len(text) and self.state is State.READING:
            if self._at is _MarkupPlace.VALUE:
                at = self._read_value(text, at)
            else:
                at = self._read_mark(text[at], at)
        return at

    def _read_mark(self, char: str, at: int) -> int:
        """Between values, character by character: what may follow is decided at once."""
        self._begun += char
        begun = self._begun
        if self._at is _MarkupPlace.NAME:
            known = self._in_name(begun)
        elif self._at is _MarkupPlace.KEY:
            known = self._in_key(begun)
        elif self._at is _MarkupPlace.VALUE_END:
            known = self._in_value_end(begun)
        elif begun.isspace():
            self._begun, known = "", True
        elif self._at is _MarkupPlace.FUNCTION:
            known = self._in_function(begun)
        else:
            known = self._in_parameter_or_end(begun)
        if not known:
            self.state = State.BROKEN
            return at
        return at + 1

    def _in_function(self, begun: str) -> bool:
        if begun == _FUNCTION:
            self._at, self._begun = _MarkupPlace.NAME, ""
        return _FUNCTION.startswith(begun)

    def _in_name(self, begun: str) -> bool:
        if begun[-1] != ">":
            return any(name.startswith(begun) for name in self._tools)
        self._tool = self._tools.get(begun[:-1])
        self._at, self._begun = _MarkupPlace.PARAMETER_OR_END, ""
        return self._tool is not None

    def _in_parameter_or_end(self, begun: str) -> bool:
        if begun == _PARAMETER:
            self._at, self._begun = _MarkupPlace.KEY, ""
        elif begun in _ENDS:
            self._end()
        return _may_follow(begun)

    def _in_key(self, begun: str) -> bool:
        if begun[-1] == ">":
            self._begin_value(begun[:-1])
            return len(begun) > 1
        return begun[-1] not in "<\n"

    def _begin_value(self, key: str) -> None:
        assert self._tool is not None
        self._certain = True
        self._at, self._begun, self._value, self._kept = _MarkupPlace.VALUE, "", "", ""
        parameters = self._tool.parameters
        known = parameters.get("properties")
        schema = known.get(key, {"type": "string"}) if isinstance(known, Mapping) else {}
        self._types = _json_types(schema, parameters)
        self._streams = self._types == {"string"}
        self._arguments.append(", " if self._n_arguments else "{")
        self._arguments.append(f"{json.dumps(key, ensure_ascii=False)}: ")
        self._n_arguments += 1
        self._is_first = True
        if self._streams:
            self._arguments.append('"')

    def _read_value(self, text: str, at: int) -> int:
        """The value as far as it is certain not to be its end: a new line and `</parameter>`."""
        self._value += text[at:]
        if self._is_first:
            self._is_first = False
            self._value = self._value.removeprefix("\n")
        where = self._value.find(_END_PARAMETER)
        if where < 0:
            self._keep(len(self._value) - held(self._value, _VALUE_ENDS))
            return len(text)
        behind = len(self._value) - where - len(_END_PARAMETER)
        self._value = self._value[:where]
        self._keep(where - self._value.endswith("\n"))
        self._at, self._begun = _MarkupPlace.VALUE_END, ""
        return len(text) - behind

    def _keep(self, n: int) -> None:
        """Make sure of the next `n` characters of the value; texts are given out at once."""
        kept, self._value = self._value[:n], self._value[n:]
        if self._streams:
            self._arguments.append(_escaped(kept))
        else:
            self._kept += kept

    def _in_value_end(self, begun: str) -> bool:
        """Behind `</parameter>`: the value has ended if a parameter or the end follows."""
        rest = begun.lstrip()
        if rest == _PARAMETER or rest in _ENDS:
            self._arguments.append('"' if self._streams else _typed(self._kept, self._types))
            return self._in_parameter_or_end(rest)
        if not _may_follow(rest):
            # It was part of the value, as in a text about this very markup.
            self._value += _END_PARAMETER
            self._keep(len(self._value))
            self._at, self._value = _MarkupPlace.VALUE, begun
        return True

    def _end(self) -> None:
        self._certain = True
        self._arguments.append("}" if self._n_arguments else "{}")
        self.state = State.DONE


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _may_follow(begun: str) -> bool:
    return _PARAMETER.startswith(begun) or any(end.startswith(begun) for end in _ENDS)


def _typed(text: str, types: frozenset[str]) -> str:
    """JSON text of a value: of one of `types` where it can be read so, else as it was written."""
    word = text.strip()
    try:
        value = json.loads(_PYTHON.get(word, word), parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = text
    # A text is written as it is, not in JSON.
    if "string" in types and (isinstance(value, str) or not _admits(types, value)):
        value = text
    return json.dumps(value, ensure_ascii=False)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Names of the types that `schema` allows; its references point into `root`."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST_SCHEMA:
        return _ALL_TYPES
    found = _ALL_TYPES
    kind = schema.get("type")
    if isinstance(kind, str):
        found &= {kind}
    elif isinstance(kind, list):
        found &= {name for name in kind if isinstance(name, str)}
    if "const" in schema:
        found &= {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {_type_of(value) for value in schema["enum"]}
    if isinstance(schema.get("$ref"), str):
        found &= _json_types(referenced(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [_json_types(part, root, depth + 1) for part in schema[key]]
            found &= frozenset().union(*each)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= _json_types(part, root, depth + 1)
    return found


def _type_of(value: Any) -> str:
    """The JSON type of a Python value; whole numbers are integers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _admits(types: frozenset[str], value: Any) -> bool:
    """Whether a value's type is among `types`."""
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)
