"""Constraints: the tokens they allow; looking leaves them where they are, and no grammar hangs or
ends the process, however bad."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.errors import GrammarError, InputError
from dflash_local.sampling import grammar as grammar_module
from dflash_local.sampling.grammar import Constraint, Grammars
from dflash_local.sampling.params import SamplingParams
from dflash_local.target_model.vocabulary import Vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"lark": 'start: "[" /[0-9]{1,4}/ ("," /[a-c]{2}/)* "]"'},
    {"grammar": 'root ::= "[" [0-9]{1,4} ("," [a-c]{2})* "]"'},
]


class Tongue:
    """A vocabulary and its grammars."""

    def __init__(self, vocabulary: Vocabulary, grammars: Grammars) -> None:
        self.vocabulary = vocabulary
        self.grammars = grammars
        self.n = vocabulary.n_tokens
        self.ends = [token for token in range(self.n) if vocabulary.ends_text(token)]

    def constraint(self, **params: Any) -> Constraint:
        chosen = SamplingParams(**params)
        chosen.validate(self.n)
        found = self.grammars.constraint(chosen)
        assert found is not None
        return found

    def allowed(self, constraint: Constraint) -> list[int]:
        logits = np.zeros(self.n, np.float32)
        constraint.mask(logits)
        return np.flatnonzero(logits == 0).tolist()

    def written(self, text: str, **params: Any) -> Constraint:
        """A constraint past a text."""
        constraint = self.constraint(**params)
        for token in self.vocabulary.tokenize(text, special=False, add_special=False):
            assert constraint.allows(token)
            constraint.accept(token)
        return constraint

    def walk(self, seed: int, most: int = 200, **params: Any) -> list[int]:
        """Tokens of a text that the constraint let through, to its end."""
        rng = np.random.default_rng(seed)
        constraint = self.constraint(**params)
        tokens: list[int] = []
        while len(tokens) < most:
            likely = rng.normal(size=self.n).astype(np.float32)
            # Whatever may end does so in the end.
            likely[self.ends] += 0.2 * len(tokens)
            constraint.mask(likely)
            while not constraint.allows(token := int(likely.argmax())):
                likely[token] = -np.inf
            tokens.append(token)
            constraint.accept(token)
            if token in self.ends:
                break
        return tokens


@pytest.fixture(scope="module")
def tongue(vocabulary: Vocabulary, grammars: Grammars) -> Tongue:
    return Tongue(vocabulary, grammars)


def kind(params: dict[str, Any]) -> str:
    return next(iter(params))


# What is allowed


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_is_of_its_schema(tongue: Tongue, seed: int) -> None:
    tokens = tongue.walk(seed, json_schema=PERSON)
    assert tokens[-1] in tongue.ends
    answer = json.loads(tongue.vocabulary.detokenize(tokens))
    assert list(answer) == ["name", "age", "tags"]
    assert len(answer["name"]) <= 8
    assert answer["age"] in range(151)
    assert len(answer["tags"]) <= 3 and set(answer["tags"]) <= {"a", "b", "bc"}


@pytest.mark.parametrize("schema", [True, {}])
def test_any_object_is_an_object(tongue: Tongue, schema: Any) -> None:
    for seed in range(3):
        tokens = tongue.walk(seed, json_schema=schema)
        if tokens[-1] in tongue.ends:
            assert isinstance(json.loads(tongue.vocabulary.detokenize(tokens)), dict)
    assert not any(
        tongue.vocabulary.piece(t)[:1] == b"["
        for t in tongue.allowed(tongue.constraint(json_schema=schema))
    )


@pytest.mark.parametrize("params", KINDS, ids=kind)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_looking_ahead_is_taking_steps(tongue: Tongue, params: dict[str, Any], seed: int) -> None:
    """And leaves the constraint where it is, also at tokens that are not allowed."""
    tokens = tongue.walk(seed, **params)
    rng = np.random.default_rng(seed)
    at = int(rng.integers(len(tokens) + 1))
    tokens = tokens[:at] + [int(t) for t in rng.integers(0, tongue.n, 3)]
    looked, stepped = tongue.constraint(**params), tongue.constraint(**params)
    n = 0
    for token in tokens:
        before = tongue.allowed(stepped)
        assert looked.n_valid(tokens[n:]) == stepped.n_valid(tokens[n:])
        assert looked.allows(token) == stepped.allows(token)
        assert tongue.allowed(stepped) == before
        if not stepped.allows(token) or (n and tokens[n - 1] in tongue.ends):
            break
        stepped.accept(token)
        looked.accept(token)
        n += 1
    assert tongue.constraint(**params).n_valid(tokens) == n
    assert n >= at


@pytest.mark.parametrize(
    ("params", "whole", "part"),
    [
        ({"json_schema": {"enum": ["ab"]}}, '"ab"', '"a'),
        ({"lark": 'start: "ab" "c"?'}, "ab", "a"),
        ({"lark": 'start: "ab" "c"?'}, "abc", ""),
        ({"grammar": 'root ::= "ab" "c"?'}, "ab", "a"),
    ],
)
def test_every_end_of_text_is_allowed_exactly_where_the_text_may_end(
    tongue: Tongue, params: dict[str, Any], whole: str, part: str
) -> None:
    assert len(tongue.ends) > 1
    done, going = tongue.written(whole, **params), tongue.written(part, **params)
    for end in tongue.ends:
        assert done.allows(end) and end in tongue.allowed(done)
        assert done.n_valid([end, end]) == 1
        assert not going.allows(end) and end not in tongue.allowed(going)
        assert going.n_valid([end]) == 0


@pytest.mark.parametrize("params", KINDS[1:], ids=kind)
def test_only_an_end_follows_the_end(tongue: Tongue, params: dict[str, Any]) -> None:
    constraint = tongue.written("[1]", **params)
    constraint.accept(tongue.ends[0])
    assert tongue.allowed(constraint) == tongue.ends
    assert constraint.allows(tongue.ends[1])
    assert constraint.n_valid(tongue.vocabulary.tokenize("[1]", add_special=False)) == 0


def test_control_tokens_are_no_text(tongue: Tongue) -> None:
    """Within a text of JSON anything else goes; a grammar gets them by their names alone."""
    control = [t for t in range(tongue.n) if not tongue.vocabulary.piece(t)]
    within = tongue.written('"a', json_schema={"type": "string"})
    assert control
    assert not any(map(within.allows, control))
    assert not set(control) & set(tongue.allowed(within))
    start = tongue.vocabulary.tokenize("<|im_start|>")
    named = tongue.constraint(lark='start: <|im_start|> "a"')
    assert tongue.allowed(named) == start
    assert named.n_valid(start + tongue.vocabulary.tokenize("a")) == 2


def test_white_space_ends(tongue: Tongue) -> None:
    vocabulary = tongue.vocabulary
    spaces = [t for t in range(tongue.n) if (p := vocabulary.piece(t)) and not p.strip()]
    constraint = tongue.written("{", json_schema=True)
    for _ in range(200):
        if not (allowed := [t for t in spaces if constraint.allows(t)]):
            return
        constraint.accept(allowed[0])
    raise AssertionError("200 tokens of white space, and more to come")


def test_an_indented_object_is_as_good(tongue: Tongue) -> None:
    value = {"name": "Ada", "age": 36, "tags": ["a", "bc"]}
    for layout in ({"indent": 2}, {"indent": 4}, {"separators": (",", ":")}, {}):
        done = tongue.written(json.dumps(value, **layout), json_schema=PERSON)  # type: ignore[arg-type]
        assert done.allows(tongue.ends[0])


def test_threads_get_constraints_of_their_own(tongue: Tongue) -> None:
    schema = {"enum": ["one", "two", "three"]}
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda seed: tongue.walk(seed, json_schema=schema), [5] * 4)
    assert others == [first] * 3


# What is wrong with them


def refused(tongue: Tongue, part: str, **params: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        tongue.constraint(**params)
    message = str(caught.value)
    assert part in message and "\n" not in message and len(message) < 400
    assert message.startswith(tuple(params))


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(n: int) -> dict[str, Any]:
    """Objects of which each is within the one before, none deep in the text."""
    rules = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
        for i in range(n)
    }
    return {"$defs": rules | {f"a{n}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def doubling(n: int) -> dict[str, Any]:
    """Each reference leads to two more."""
    rules = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(n)}
    return {"$defs": rules, "$ref": "#/$defs/a0"}


BAD: dict[str, list[tuple[Any, str]]] = {
    "json_schema": [
        (False, "True for any JSON object"),
        ([1], "give a schema"),
        ("{}", "give a schema"),
        ({"type": "nope"}, "Invalid type: nope"),
        ({"properties": []}, "properties must be"),
        ({"enum": []}, "Unsatisfiable"),
        ({"not": {"type": "string", "minLength": 3}}, "json_schema: not cannot be enforced"),
        ({"enum": [1], "not": {"const": 1}}, "json_schema: not cannot be enforced"),
        ({"not": {"type": {}}}, "json_schema: not cannot be enforced"),
        ({"type": "array", "uniqueItems": True}, "json_schema: uniqueItems cannot be enforced"),
        ({"type": "array", "contains": {}, "minContains": 2}, "contains, minContains cannot be"),
        ({"type": "string", "pattern": "^(?!a)"}, "json_schema: pattern cannot be enforced"),
        ({"patternProperties": {"(?<=a)": {}}}, "patternProperties cannot be enforced"),
        (doubling(40), "references"),
        ({"type": "string", "pattern": "["}, "unclosed"),
        ({"type": "string", "pattern": r"(?=a)b\1"}, "not supported"),
        ({"$ref": "#"}, "no text"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"minimum": 10**400, "type": "integer"}, "number out of range"),
        ({"const": float("nan")}, "as JSON"),
        ({"const": b"bytes"}, "as JSON"),
        ({"const": "\ud800"}, "hex escape"),
        (deep(40), "64 brackets"),
        (deep(5000), "json_schema"),
        ({"enum": ["x" * 300_000]}, "bytes"),
    ],
    "lark": [
        ("", "give a Lark grammar"),
        (7, "give a Lark grammar"),
        ('a: "x"', "no start rule"),
        ("start: b", "b"),
        ("start: a\na: b\nb: a", "no text"),
        ("start: <|nope|>", "<|nope|>"),
        ('start: "\ud800"', "Unicode"),
        ("start: " + "(" * 90 + '"a"' + ")" * 90, "64 brackets"),
        ("start: " + '"a" ' * 90_000, "bytes"),
        ("\0\1", "lexer"),
        ("%import nope.X\nstart: X", "nope.X"),
    ],
    "grammar": [
        ("", "give GBNF"),
        ("  \n", "give GBNF"),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\nb ::= [c', "line 2"),
        ('"a"', "Expected name"),
        ('start ::= "a"', "root"),
        ("root ::= expr", "expr"),
        ("root ::= root", "no text"),
        ("nonsense", "Expected ::="),
        ('root ::= "a" )', "Expected name"),
        ('root ::= ("a"', "Expected ')'"),
        ('root ::= "\\q"', "Invalid escape"),
        ("root ::= *", "Expected name"),
        ('root ::= "a"{5,2}', "{5,2}"),
        ('root ::= "\0"', "lexer error"),
        ('root ::= "\ud800"', "Unicode"),
        ('root ::= "a" <[5]>', "<[5]>"),
        ('root ::= "a" !<[5]>', "!<[5]>"),
        ('root ::= "a" b\nb ::= c b\nc ::= d\nd ::= ""', "another way"),
        ("root ::= " + "(" * 1000 + '"a"' + ")" * 1000, "brackets"),
    ],
}  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "bad", "part"),
    [(kind, bad, part) for kind, cases in BAD.items() for bad, part in cases],
)
def test_a_bad_one_is_a_line_and_the_process_lives(
    tongue: Tongue, kind: str, bad: Any, part: str
) -> None:
    refused(tongue, part, **{kind: bad})


def test_recursion_beyond_a_stack_is_refused(tongue: Tongue) -> None:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(15_000))
    refused(tongue, "nest its rules less deeply", lark=f'{rules}\nr15000: "a"\nstart: r0')


def test_a_compilation_without_end_is_stopped(
    tongue: Tongue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_LONGEST_TRIAL_S", 0.3)
    patterns = [{"type": "string", "pattern": f".*{i}.*"} for i in range(24)]
    refused(tongue, "simplify", json_schema={"allOf": patterns})


def test_no_reference_is_fetched(tongue: Tongue) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        refused(tongue, "does not fetch", json_schema={"$ref": url})
        refused(tongue, "does not fetch", json_schema={"$ref": "file:///etc/hostname"})
        refused(tongue, "does not fetch", lark=f'start: %json {{"$ref": "{url}"}}')
        tongue.constraint(json_schema={"$schema": url, "$id": url, "type": "object"})
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a+)+$"},
        {"type": "string", "pattern": "(a?){500}a{500}"},
        {"type": "string", "pattern": "(.*a.{12}|.*b.{13}|.*c.{11})+"},
        {"type": "string", "minLength": 10**6},
        {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
        {"enum": [f"value number {i}" for i in range(9000)]},
        {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(100)]},
        {"type": "object", "x-guidance": {"whitespace_pattern": "(.*a.{30})*"}},
        chain(1000),
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_a_monstrous_schema_can_be_followed(tongue: Tongue, schema: dict[str, Any]) -> None:
    """On the stack that the smallest threads have, too."""
    found: list[list[int]] = []
    tongue.constraint(json_schema=schema)
    before = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(
            target=lambda: found.append(tongue.walk(3, most=40, json_schema=schema))
        )
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert found and len(found[0]) >= 2


def test_at_most_one_grammar_binds_an_answer(tongue: Tongue) -> None:
    with pytest.raises(InputError, match="grammar and lark"):
        tongue.constraint(grammar='root ::= "a"', lark='start: "a"')
    with pytest.raises(InputError, match="json_schema and lark"):
        tongue.constraint(json_schema=False, lark='start: "a"')
