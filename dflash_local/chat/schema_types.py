"""The JSON types that a JSON schema allows a value to have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.sampling.json_schema import referenced

ALL = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
# Schemas may refer to themselves. Deeper than this, every type is allowed.
_MAX_DEPTH = 16


def json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Names of the types that `schema` allows; its references point into `root`."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ALL
    found = ALL
    kind = schema.get("type")
    if isinstance(kind, str):
        found &= {kind}
    elif isinstance(kind, list):
        found &= {name for name in kind if isinstance(name, str)}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {type_of(value) for value in schema["enum"]}
    if isinstance(schema.get("$ref"), str):
        found &= json_types(referenced(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [json_types(part, root, depth + 1) for part in schema[key]]
            found &= frozenset().union(*each)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= json_types(part, root, depth + 1)
    return found


def type_of(value: Any) -> str:
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


def admits(types: frozenset[str], value: Any) -> bool:
    """Whether a value's type is among `types`."""
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)
