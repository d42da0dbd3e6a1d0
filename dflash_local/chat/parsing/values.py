"""Values of arguments that are not written in JSON."""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dflash_local.sampling.json_schema import referenced

# Python's words, which templates show the models for values of the last turn.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WORDS = {"true": True, "false": False, "null": None}
ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
# Of texts that are no value in Python, or none that JSON has.
_FAULTS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
# Schemas may refer to themselves. Deeper than this, every type is allowed.
_DEEPEST_SCHEMA = 16


def python_arguments(text: str) -> str | None:
    """`key=value, ...` of a call in Python as a JSON object; None where it is something else."""
    try:
        call = _parsed(f"_({text})")
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        return None if None in values else json.dumps(values, ensure_ascii=False, allow_nan=False)
    except _FAULTS:
        return None


class _WithWords(ast.NodeTransformer):
    """JSON's words in Python are values, too."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _parsed(text: str) -> Any:
    return _WithWords().visit(ast.parse(text, mode="eval").body)


def typed(text: str, types: frozenset[str]) -> str:
    """JSON text of a value: of one of `types` where it can be read so, else as it was written."""
    word = text.strip()
    try:
        value = json.loads(_PYTHON.get(word, word), parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = text
        if word[:1] in ("[", "{"):
            with suppress(*_FAULTS):
                found = ast.literal_eval(_parsed(word))
                json.dumps(found, allow_nan=False)
                value = found
    # A text is written as it is, not in JSON.
    admitted = types | {"integer"} if "number" in types else types
    if "string" in types and (isinstance(value, str) or _type_of(value) not in admitted):
        value = text
    return json.dumps(value, ensure_ascii=False)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Names of the types that `schema` allows; its references point into `root`."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST_SCHEMA:
        return ALL_TYPES
    found = ALL_TYPES
    kinds = schema.get("type")
    if isinstance(kinds, (str, list)):
        kinds = [kinds] if isinstance(kinds, str) else kinds
        found &= {name for name in kinds if isinstance(name, str)}
    if "const" in schema:
        found &= {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {_type_of(value) for value in schema["enum"]}
    if isinstance(schema.get("$ref"), str):
        found &= json_types(referenced(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            each = [json_types(part, root, depth + 1) for part in schema[key]]
            of_any = frozenset[str]().union(*each)
            found &= ALL_TYPES.intersection(*each) if key == "allOf" else of_any
    return found


def _type_of(value: Any) -> str:
    """The JSON type of a Python value; whole numbers are integers."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return _TYPES.get(type(value), "object" if isinstance(value, Mapping) else "array")
