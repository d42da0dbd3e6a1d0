"""The texts that a JSON schema lets through, where grammars need it put another way."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from dflash_local.errors import GrammarError
from dflash_local.sampling.json_schema import enforceable

INTEGER = {"type": "integer"}
POINT = {"type": "object", "properties": {"x": INTEGER, "y": INTEGER}, "required": ["x"]}
BYTES = LLTokenizer("byte")


def fits(schema: dict[str, Any], value: Any, *, lenient: bool = False) -> bool:
    """Whether the schema lets the value through, its keys in their order."""
    return fits_text(schema, json.dumps(value, separators=(",", ":")), lenient=lenient)


def fits_text(schema: dict[str, Any], text: str, *, lenient: bool = False) -> bool:
    """Whether the schema lets this text of JSON through."""
    options = {"whitespace_flexible": False, "coerce_one_of": True, "lenient": lenient}
    bound = {**enforceable(schema, lenient=lenient), "x-guidance": options}
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(bound)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_an_object_has_the_properties_that_its_schema_names() -> None:
    assert fits(POINT, {"x": 1, "y": 2}) and fits(POINT, {"x": 1})
    assert not fits(POINT, {"x": 1, "z": 2})
    assert not fits(POINT, {"y": 1, "x": 2})
    nested = {"type": "array", "items": {"anyOf": [POINT, {"type": "null"}]}}
    assert fits(nested, [{"x": 1}, None])
    assert not fits(nested, [{"x": 1, "z": 2}])


def test_no_key_comes_twice() -> None:
    assert fits_text(POINT, '{"x":1,"y":2}')
    assert not fits_text(POINT, '{"x":1,"y":2,"y":3}')
    assert not fits_text(POINT, '{"x":1,"x":2}')


def test_an_object_that_says_what_else_it_has_stays_open() -> None:
    assert fits({**POINT, "additionalProperties": True}, {"x": 1, "z": "2"})
    assert fits({**POINT, "additionalProperties": INTEGER}, {"x": 1, "z": 2})
    assert fits({**POINT, "patternProperties": {"^z": INTEGER}}, {"x": 1, "z": 2})
    assert fits({"type": "object"}, {"a": [{"b": None}]})
    assert fits({**POINT, "required": ["z"]}, {"x": 1, "z": "any"})


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"z": INTEGER}, "required": ["z"]}]},
        {"$ref": "#/$defs/p", "required": ["z"]},
        {"allOf": [{"$ref": "#/$defs/p"}], "properties": {"z": INTEGER}, "required": ["z"]},
        {"allOf": [{"$ref": "#/$defs/q"}, {"$ref": "#/$defs/r"}]},
        {
            "properties": {"x": INTEGER, "y": INTEGER},
            "anyOf": [{"required": ["w"]}, {"properties": {"z": INTEGER}, "required": ["z"]}],
            "unevaluatedProperties": False,
        },
    ],
)
def test_schemas_that_hold_together_close_an_object_together(schema: dict[str, Any]) -> None:
    shared = {
        "p": POINT,
        "q": {"allOf": [{"$ref": "#/$defs/p"}]},
        "r": {"properties": {"z": INTEGER}, "required": ["z"]},
    }
    schema = {"type": "object", **schema, "$defs": shared}
    properties = {"x": 1, "y": 2, "z": 3}
    orders = (properties, {"z": 3, "x": 1, "y": 2})
    assert any(fits(schema, order) for order in orders)
    assert not any(fits(schema, {**order, "other": 4}) for order in orders)
    assert not fits(schema, {"x": 1, "y": 2})


def test_one_alternative_has_no_properties_of_another() -> None:
    kinds = [{"properties": {name: INTEGER}, "required": [name]} for name in ("a", "b")]
    schema = {"type": "object", "properties": {"kind": {"const": "k"}}, "anyOf": kinds}
    assert fits(schema, {"kind": "k", "a": 1}) and fits(schema, {"kind": "k", "b": 1})
    assert not fits(schema, {"kind": "k", "a": 1, "b": 1})


def test_a_schema_may_contain_itself() -> None:
    tree = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#"}}}
    assert fits(tree, {"v": 1, "next": {"v": 2, "next": {}}})
    assert not fits(tree, {"v": 1, "next": {"w": 2}})
    knot = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, POINT]}}, "$ref": "#/$defs/a"}
    assert enforceable(knot)


def test_keywords_that_say_nothing_are_taken() -> None:
    assert fits({"type": "array", "uniqueItems": False}, [1, 1])
    assert fits({"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1}, [1])
    words = {"type": "object", "additionalProperties": INTEGER, "propertyNames": {"type": "string"}}
    assert fits(words, {"a": 1})


def test_a_set_of_a_few_values() -> None:
    schema = {
        "type": "array",
        "items": {"$ref": "#/$defs/colour"},
        "uniqueItems": True,
        "minItems": 1,
        "$defs": {"colour": {"enum": ["red", "green", "blue"]}},
    }
    assert fits(schema, ["blue", "red"]) and fits(schema, ["red", "green", "blue"])
    assert not fits(schema, ["red", "red"])
    assert not fits(schema, [])


def test_values_and_types_that_are_not_allowed() -> None:
    assert fits({"enum": [1, True, "a"], "not": {"const": 1}}, True)
    assert not fits({"enum": [1, True, "a"], "not": {"enum": [1, "a"]}}, 1)
    assert fits({"not": {"type": "null"}}, "a") and not fits({"not": {"type": "null"}}, None)
    assert not fits({"type": ["integer", "string"], "not": {"type": "number"}}, 1)


def test_what_cannot_be_enforced_is_named_or_left_out() -> None:
    schema = {"type": "string", "pattern": "^(?!a)", "not": {"minLength": 3}}
    with pytest.raises(GrammarError, match="not cannot be enforced"):
        enforceable(schema)
    assert fits(schema, "abc", lenient=True)
