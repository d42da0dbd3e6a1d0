"""Grammars of the dialects: they let through what the parser reads as the wanted call or the wanted
JSON, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.llamacpp import lltokenizer_from_vocab

import chat_models
from dflash_local import Model, load
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
from dflash_local.sampling.params import SamplingParams

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


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Any:
    return lltokenizer_from_vocab(model.target.vocabulary.pointer)


class Forced:
    """A dialect's grammar over the shipped tokenizer, in which no mark is a token."""

    def __init__(self, model: Model, tokenizer: Any) -> None:
        self.model, self._tokenizer = model, tokenizer

    def accepts(self, dialect: Dialect, text: str, **options: Any) -> bool:
        usual = {"parallel": False, "is_token": self.model.is_token, "thinking_open": False}
        return self.lets_through(dialect.call_grammar(TOOLS, **{**usual, **options}), text)

    def lets_through(self, grammar: str | None, text: str) -> bool:
        assert grammar is not None
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.model.target.vocabulary.tokenize(text, add_special=False)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.fixture(scope="module")
def forced(model: Model, tokenizer: Any) -> Forced:
    return Forced(model, tokenizer)


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
    assert forced.accepts(dialect, text)
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
    assert not forced.accepts(dialect, text)


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
        assert forced.accepts(dialect, f"{one}\n{one}", parallel=True)
        assert forced.accepts(dialect, one, parallel=True)


def test_reasoning_that_the_prompt_has_opened_is_closed_first(forced: Forced) -> None:
    answer = "Hm.\n</think>\n\n" + hermes("now", "{}")
    assert forced.accepts(HERMES, answer, thinking_open=True)
    assert not forced.accepts(HERMES, hermes("now", "{}"), thinking_open=True)


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


def test_a_model_with_a_family_s_template_speaks_its_dialect(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    path = chat_models.with_template(pair[0], tmp_path / "qwen3.gguf", "qwen3")
    with load(path, n_ctx=1024, n_gpu_layers=0, n_threads=1, quiet=True) as model:
        assert model.dialect == HERMES
        prompt = model.chat_prompt([{"role": "user", "content": "Hi"}], [chat_models.WEATHER])
        assert "get_weather" in model.detokenize(prompt)
        assert not model.thinking_open(prompt)
        assert model.thinking_open(prompt + model.tokenize("<think>\n"))


# Answers that are JSON of a schema: what comes before the JSON stays free.

ANSWER = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
GOOD, BAD = '{"a": 1}', '{"a": 2}'
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def n_accepted(model: Model, grammar: str, text: str) -> tuple[int, int]:
    """The number of a text's tokens that the grammar lets through, and of all of them."""
    tokens = model.target.vocabulary.tokenize(text, add_special=False)
    constraint = model.engine.grammars.constraint(SamplingParams(lark=grammar))
    assert constraint is not None
    return constraint.n_valid(tokens), len(tokens)


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
    model: Model, dialect: Dialect, thinking_open: bool, before: str
) -> None:
    grammar = dialect.answer_grammar(ANSWER, is_token=model.is_token, thinking_open=thinking_open)
    assert grammar is not None
    found, n = n_accepted(model, grammar, before + GOOD)
    assert found == n
    found, n = n_accepted(model, grammar, before + BAD)
    assert found < n
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
def test_a_call_or_an_answer_by_the_schema(model: Model, dialect: Dialect, text: str) -> None:
    settings = {"is_token": model.is_token, "thinking_open": False}
    call = dialect.call_grammar(TOOLS, parallel=True, **settings)
    answer = dialect.answer_grammar(ANSWER, **settings)
    assert call is not None
    grammar = either(call, answer or json_rule("start", ANSWER, lenient=False))
    before = "<|channel|>final<|message|>" if isinstance(dialect, Harmony) else ""
    for whole in (text, before + GOOD):
        found, n = n_accepted(model, grammar, whole)
        assert found == n
    for other in (before + BAD, before + "Hello"):
        found, n = n_accepted(model, grammar, other)
        assert found < n
