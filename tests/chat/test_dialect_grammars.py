"""Grammars of the dialects: they let through what the parser reads as the wanted call or the wanted
JSON, and nothing else."""

from dataclasses import replace
from typing import Any

import pytest

import chat_models
from dflash_local import Model
from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import (
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    joined,
)
from dflash_local.chat.families import dialect_of
from dflash_local.chat.form import THINK
from dflash_local.chat.harmony import Harmony
from dflash_local.chat.lark import either, json_rule
from dflash_local.chat.reader import called_by
from dflash_local.chat.tool import Tool
from forced_grammar import Forced

# llguidance's own reading of the vocabulary.
pytestmark = pytest.mark.filterwarnings("ignore:llama_token_get_attr")

HERMES = dialect_of(chat_models.template("qwen3"))
CODER = dialect_of(chat_models.template("qwen3_coder"))
LLAMA = dialect_of(chat_models.template("llama31"))
THOUGHTLESS = replace(HERMES, thinking=None)
THINKING_CODER = replace(CODER, thinking=THINK)
PLAIN = Dialect()

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "box": {"$ref": "#/$defs/box"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"box": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
}
TOOLS = [Tool("get_weather", None, SCHEMA), Tool("now")]
ARGUMENTS = '{"city": "Paris", "days": 3, "unit": "C", "box": {"a": true}}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, *parameters: str) -> str:
    inner = "".join(f"<parameter={p}\n</parameter>\n" for p in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def harmony(name: str, arguments: str) -> str:
    to = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{to}{arguments}"


def accepts(forced: Forced, dialect: Dialect, text: str, **options: Any) -> bool:
    usual = {"parallel": False, "is_token": forced.model.is_token, "thinking_open": False}
    return forced.lets_through(dialect.call_grammar(TOOLS, **{**usual, **options}), text)


VALID = [
    (HERMES, hermes("get_weather", ARGUMENTS)),
    (HERMES, hermes("get_weather", '{"city":"Paris"}')),
    (HERMES, hermes("now", "{}")),
    (HERMES, "<think>\nHm. <tool_call>\n</think>\n\n" + hermes("now", "{}")),
    (
        CODER,
        coder("get_weather", "city>\nParis", "days>\n3", "unit>\nC", 'box>\n{"a": true}'),
    ),
    (CODER, coder("get_weather", "city>\n")),
    (CODER, coder("now")),
    (THINKING_CODER, "<think>\nHm.\n</think>\n\n" + coder("now")),
    (LLAMA, llama("get_weather", ARGUMENTS)),
    (LLAMA, llama("now", "{}")),
    (Harmony(), harmony("get_weather", ARGUMENTS)),
    (
        Harmony(),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + harmony("now", "{}"),
    ),
]


@pytest.mark.parametrize(("dialect", "text"), VALID)
def test_a_call_is_let_through_and_read(forced: Forced, dialect: Dialect, text: str) -> None:
    assert accepts(forced, dialect, text)
    parser = dialect.parser(TOOLS)
    kinds = [type(event) for event in joined(parser.feed(text, is_last=True))]
    assert kinds[-2:] == [ToolCallStart, ToolCallArguments]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (HERMES, "Hello"),
        (HERMES, hermes("get_weather", "{}")),
        (HERMES, hermes("get_weather", '{"city": 3}')),
        (HERMES, hermes("get_weather", '{"city": "Paris", "days": "3"}')),
        (HERMES, hermes("get_weather", '{"city": "Paris", "more": 1}')),
        (HERMES, hermes("nowhere", "{}")),
        (HERMES, hermes("now", '{"a": 1}')),
        (HERMES, hermes("now", "{}") + "\n" + hermes("now", "{}")),
        (THOUGHTLESS, "<think></think>" + hermes("now", "{}")),
        (CODER, coder("get_weather")),
        (CODER, coder("get_weather", "city>\nParis", "days>\nthree")),
        (CODER, coder("get_weather", "city>\nParis", "unit>\nK")),
        (CODER, coder("get_weather", "city>\nA name of 19 letters")),
        (CODER, coder("now", "a>\n1")),
        (LLAMA, "Hello"),
        (LLAMA, llama("get_weather", "{}")),
        (Harmony(), "<|channel|>final<|message|>Hello"),
        (Harmony(), harmony("get_weather", "{}")),
    ],
)
def test_everything_else_is_refused(forced: Forced, dialect: Dialect, text: str) -> None:
    assert not accepts(forced, dialect, text)


def test_a_named_tool_is_the_only_one(forced: Forced) -> None:
    for dialect, write in ((HERMES, hermes), (LLAMA, llama), (Harmony(), harmony)):
        is_token = forced.model.is_token
        called = called_by("now", TOOLS)
        grammar = dialect.call_grammar(
            called, parallel=True, is_token=is_token, thinking_open=False
        )
        assert grammar is not None
        assert forced.lets_through(grammar, write("now", "{}"))
        assert not forced.lets_through(grammar, write("get_weather", ARGUMENTS))


def test_parallel_calls_are_let_through_where_asked_for(forced: Forced) -> None:
    for dialect, one in ((HERMES, hermes("now", "{}")), (CODER, coder("now"))):
        assert accepts(forced, dialect, f"{one}\n{one}", parallel=True)
        assert accepts(forced, dialect, one, parallel=True)


def test_reasoning_that_the_prompt_has_opened_is_closed_first(forced: Forced) -> None:
    answer = "Hm.\n</think>\n\n" + hermes("now", "{}")
    assert accepts(forced, HERMES, answer, thinking_open=True)
    assert not accepts(forced, HERMES, hermes("now", "{}"), thinking_open=True)


def test_marks_that_are_tokens_are_named_as_such() -> None:
    for dialect, token in ((HERMES, "<tool_call>"), (Harmony(), "<|message|>")):
        grammar = dialect.call_grammar(
            TOOLS, parallel=False, is_token=lambda _: True, thinking_open=False
        )
        assert grammar is not None and f" {token} " in grammar and f'"{token}"' not in grammar


def test_plain_models_cannot_be_made_to_call() -> None:
    settings = {"parallel": False, "is_token": lambda _: False, "thinking_open": False}
    assert PLAIN.call_grammar(TOOLS, **settings) is None


def test_control_tokens_are_tokens_and_text_is_not(model: Model) -> None:
    assert model.is_token("<|im_end|>")
    assert not any(map(model.is_token, ("<tool_call>", "the", "", "<|im_end|><|im_end|>")))


# Answers that are JSON of a schema: what comes before the JSON stays free.

ANSWER = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
GOOD, BAD = '{"a": 1}', '{"a": 2}'
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("dialect", "thinking_open", "before"),
    [
        (HERMES, False, ""),
        (HERMES, False, '<think>\nHm, {"a": 2}.\n</think>\n\n'),
        (HERMES, True, "Hm.\n</think>\n\n"),
        (THINKING_CODER, False, "<think>\nHm.\n</think>\n\n"),
        (Dialect(thinking=THINK), True, "Hm.\n</think>\n\n"),
        (Harmony(), False, FINAL),
        (Harmony(), False, ANALYSIS + FINAL),
    ],
)
def test_the_schema_binds_the_content(
    forced: Forced, dialect: Dialect, thinking_open: bool, before: str
) -> None:
    settings = {"is_token": forced.model.is_token, "thinking_open": thinking_open}
    grammar = dialect.answer_grammar(ANSWER, **settings)
    assert forced.lets_through(grammar, before + GOOD)
    assert not forced.lets_through(grammar, before + BAD)
    parser = dialect.parser((), thinking_open=thinking_open)
    events = parser.feed(before + GOOD, is_last=True)
    assert "".join(e.text for e in events if isinstance(e, Content)) == GOOD
    thought = "Hm" in "".join(e.text for e in events if isinstance(e, Reasoning))
    assert thought == ("Hm" in before)


@pytest.mark.parametrize("dialect", [PLAIN, CODER, LLAMA])
def test_where_the_content_is_all_the_schema_alone_does(model: Model, dialect: Dialect) -> None:
    settings = {"is_token": model.is_token, "thinking_open": False}
    assert dialect.answer_grammar(ANSWER, **settings) is None


@pytest.mark.parametrize(
    ("dialect", "text"), [each for each in VALID if not each[0].calls_are_json]
)
def test_a_call_or_an_answer_by_the_schema(forced: Forced, dialect: Dialect, text: str) -> None:
    settings = {"is_token": forced.model.is_token, "thinking_open": False}
    call = dialect.call_grammar(TOOLS, parallel=True, **settings)
    answer = dialect.answer_grammar(ANSWER, **settings)
    assert call is not None
    grammar = either(call, answer or json_rule("start", ANSWER, lenient=False))
    before = "<|channel|>final<|message|>" if isinstance(dialect, Harmony) else ""
    assert all(forced.lets_through(grammar, whole) for whole in (text, before + GOOD))
    assert not any(forced.lets_through(grammar, before + other) for other in (BAD, "Hello"))
