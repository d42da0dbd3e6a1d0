"""JSON schemas as a grammar can enforce them.

By JSON Schema an object may have any keys that its schema does not mention. A model that may write
them rambles to its limit, with the same key twice. So an object that names its properties, and says
nothing of others, has these alone, as with OpenAI and llama-server.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_local.errors import GrammarError

_ALL_TYPES = ("string", "number", "boolean", "null", "object", "array")
_OF_PARTS = ("items", "additionalItems", "additionalProperties", "contains")
_OF_NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf")

_MOST_STEPS = 100_000
"""More than a schema of the largest size has. One whose references multiply would take for ever."""

_MOST_ORDERED = 4
"""Values of which all lists without a repetition are written out: 65 lists."""

_LOOKS_AROUND = "look-ahead and look-behind are not supported"
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def enforceable(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """`schema` with its objects closed, and with keywords that llguidance does not know put into
    ones that it knows, where that is possible.

    Raises GrammarError for the others of `uniqueItems`, `not` and look-around, and names the
    keyword; `lenient` leaves them out instead.
    """
    try:
        read: dict[str, Any] = _Reader(schema, lenient=lenient).read(schema)
    except RecursionError:
        raise GrammarError("json_schema is nested too deeply; write it more simply") from None
    return read


def referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a reference within `root` points to; an empty one for any other."""
    found: Any = root
    head, *steps = reference.split("/")
    if head != "#":
        return {}
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return {}
        found = found[key]
    return found


class _Reader:
    def __init__(self, root: Mapping[str, Any], *, lenient: bool) -> None:
        self._root = root
        self._lenient = lenient
        self._n_steps = 0

    def read(
        self, schema: Any, beside: Iterable[str] = (), inside: frozenset[str] = frozenset()
    ) -> Any:
        """`schema`, where other schemas that name the properties `beside` hold for the same value.
        `inside`: the references that led here from the same value."""
        if not isinstance(schema, Mapping):
            return schema
        schema = self._with_known_keywords(schema)
        always = {
            **dict.fromkeys([*_own_names(schema), *beside]),
            **self._names_in(schema, "allOf", "$ref"),
        }
        sometimes = self._names_in(schema, *_ALTERNATIVES, "then", "else")
        every = {**always, **sometimes}
        self._count(len(every) + 1)
        read: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _OF_NAMED_PARTS and isinstance(value, Mapping):
                read[key] = {name: self.read(part) for name, part in value.items()}
            elif key in _OF_PARTS and isinstance(value, Mapping):
                read[key] = self.read(value)
            elif key in ("items", "prefixItems") and isinstance(value, list):
                read[key] = [self.read(part) for part in value]
            elif key in ("allOf", *_ALTERNATIVES) and isinstance(value, list):
                others = every if key == "allOf" else always
                read[key] = [self.read(part, others, inside) for part in value]
            else:
                read[key] = value
        self._close(read, every)
        self._open_target(read, every, inside)
        return read

    @staticmethod
    def _close(schema: dict[str, Any], names: Iterable[str]) -> None:
        properties = schema.get("properties")
        if schema.get("unevaluatedProperties") is False:
            del schema["unevaluatedProperties"]
            properties = properties or {}
        says_more = {"additionalProperties", "patternProperties"} & schema.keys()
        if isinstance(properties, Mapping) and not says_more:
            schema["properties"] = {**properties, **{n: {} for n in names if n not in properties}}
            schema["additionalProperties"] = False

    def _open_target(
        self, schema: dict[str, Any], names: Iterable[str], inside: frozenset[str]
    ) -> None:
        """Write out the schema behind a reference, where it is closed to some of `names`."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference in inside:
            return
        target = referenced(reference, self._root)
        if set(names) - self._names(target, frozenset()).keys():
            del schema["$ref"]
            part = self.read(target, names, inside | {reference})
            schema["allOf"] = [part, *schema.get("allOf", ())]

    def _names(self, schema: Any, inside: frozenset[str]) -> dict[str, None]:
        """The properties that `schema` and those that hold for the same value name, in order."""
        self._count(1)
        if not isinstance(schema, Mapping):
            return {}
        keys = "allOf", *_ALTERNATIVES, "then", "else", "$ref"
        return dict.fromkeys(_own_names(schema)) | self._names_in(schema, *keys, inside=inside)

    def _names_in(
        self, schema: Mapping[str, Any], *keys: str, inside: frozenset[str] = frozenset()
    ) -> dict[str, None]:
        names: dict[str, None] = {}
        for key in keys:
            parts, within = schema.get(key), inside
            if key == "$ref":
                if not isinstance(parts, str) or parts in inside:
                    continue
                within, parts = inside | {parts}, [referenced(parts, self._root)]
            for part in parts if isinstance(parts, list) else [parts]:
                names |= self._names(part, within)
        return names

    def _with_known_keywords(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        known = dict(schema)
        if "uniqueItems" in known and not _put_unique(known, self._root):
            self._refuse(known, "uniqueItems", "a grammar cannot compare the items of a list")
        if "not" in known and not _put_not(known):
            self._refuse(known, "not", "a grammar can only leave out values of an enum, and types")
        if known.get("propertyNames") in ({}, True, {"type": "string"}):
            del known["propertyNames"]
        if known.get("unevaluatedProperties") is True:
            del known["unevaluatedProperties"]
        if _looks_around(known.get("pattern")):
            self._refuse(known, "pattern", _LOOKS_AROUND)
        named = known.get("patternProperties")
        if isinstance(named, Mapping) and any(map(_looks_around, named)):
            self._refuse(known, "patternProperties", _LOOKS_AROUND)
        return known

    def _refuse(self, schema: dict[str, Any], keyword: str, reason: str) -> None:
        if not self._lenient:
            raise GrammarError(
                f"json_schema: {keyword} cannot be enforced: {reason}; leave it out, and check the "
                "answer"
            )
        del schema[keyword]

    def _count(self, n: int) -> None:
        self._n_steps += n
        if self._n_steps > _MOST_STEPS:
            raise GrammarError("json_schema: its references lead too far; write it more simply")


def _own_names(schema: Mapping[str, Any]) -> list[str]:
    """The keys of `properties`, then those that are only required."""
    properties, required = schema.get("properties"), schema.get("required")
    return [
        *(properties if isinstance(properties, Mapping) else ()),
        *(name for name in (required if isinstance(required, list) else ()) if type(name) is str),
    ]


def _put_unique(schema: dict[str, Any], root: Mapping[str, Any]) -> bool:
    """Replace `uniqueItems` by keywords of the same meaning. False if that is not possible."""
    most, least = schema.get("maxItems"), schema.get("minItems", 0)
    if schema["uniqueItems"] is not True or most in (0, 1):
        del schema["uniqueItems"]
        return True
    items = schema.get("items")
    if isinstance(items, Mapping) and isinstance(items.get("$ref"), str):
        items = referenced(items["$ref"], root)
    values = items.get("enum") if isinstance(items, Mapping) else None
    bounds = isinstance(least, int) and (most is None or isinstance(most, int))
    if schema.get("type") != "array" or "prefixItems" in schema or not bounds:
        return False
    if not isinstance(values, list):
        return False
    values = list({_text(value): value for value in values}.values())
    if len(values) > _MOST_ORDERED:
        return False
    sizes = [n for n in range(len(values) + 1) if n >= least and (most is None or n <= most)]
    lists = [list(chosen) for n in sizes for chosen in itertools.permutations(values, n)]
    for keyword in ("uniqueItems", "items", "minItems", "maxItems"):
        schema.pop(keyword, None)
    schema["enum"] = lists
    return True


def _put_not(schema: dict[str, Any]) -> bool:
    """Replace `not` by keywords of the same meaning. False if that is not possible."""
    forbidden = schema["not"]
    if not isinstance(forbidden, Mapping) or len(forbidden) != 1:
        return False
    ((keyword, given),) = forbidden.items()
    if keyword == "enum" and not isinstance(given, list):
        return False
    left: list[Any] = []
    if keyword in ("const", "enum") and isinstance(schema.get("enum"), list):
        unwanted = {_text(given)} if keyword == "const" else set(map(_text, given))
        keyword, left = "enum", [x for x in schema["enum"] if _text(x) not in unwanted]
    elif keyword == "type" and given in _ALL_TYPES:
        types = schema.get("type", list(_ALL_TYPES))
        types = types if isinstance(types, list) else [types]
        gone = ("number", "integer") if given == "number" else (given,)
        left = [kind for kind in types if kind not in gone]
    if left:
        schema[keyword] = left
        del schema["not"]
    return bool(left)


def _looks_around(pattern: object) -> bool:
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
