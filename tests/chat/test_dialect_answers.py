"""Answers bound to a JSON schema, in each family's way: what comes before the JSON stays free."""

from __future__ import annotations

import pytest

from dflash_local import Model
from dflash_local.chat.dialect import Dialect
from dflash_local.chat.dialects.harmony import Harmony
from dflash_local.chat.dialects.hermes import Hermes
from dflash_local.chat.dialects.llama31 import Llama31
from dflash_local.chat.dialects.plain import Plain
from dflash_local.chat.dialects.qwen_coder import QwenCoder
from dflash_local.chat.events import Content, Reasoning
from dflash_local.sampling.params import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
GOOD, BAD = '{"a": 1}', '{"a": 2}'
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def n_accepted(model: Model, grammar: str, text: str) -> tuple[int, int]:
    """How many of a text's tokens the grammar lets through, and how many there are."""
    tokens = model.target.vocabulary.tokenize(text, add_special=False)
    constraint = model.engine.grammars.constraint(SamplingParams(lark=grammar))
    assert constraint is not None
    return constraint.n_valid(tokens), len(tokens)


@pytest.mark.parametrize(
    ("dialect", "thinking_open", "before"),
    [
        (Hermes(), False, ""),
        (Hermes(), False, '<think>\nHm, {"a": 2}.\n</think>\n\n'),
        (Hermes(), True, "Hm.\n</think>\n\n"),
        (QwenCoder(thinking=True), False, "<think>\nHm.\n</think>\n\n"),
        (Plain(thinking=True), True, "Hm.\n</think>\n\n"),
        (Harmony(), False, FINAL),
        (Harmony(), False, ANALYSIS + FINAL),
    ],
)
def test_the_schema_binds_the_content(
    model: Model, dialect: Dialect, thinking_open: bool, before: str
) -> None:
    grammar = dialect.answer_grammar(SCHEMA, is_token=model.is_token, thinking_open=thinking_open)
    assert grammar is not None
    found, n = n_accepted(model, grammar, before + GOOD)
    assert found == n
    found, n = n_accepted(model, grammar, before + BAD)
    assert found < n
    parser = dialect.parser((), thinking_open=thinking_open)
    events = parser.feed(before + GOOD) + parser.finish()
    assert "".join(e.text for e in events if isinstance(e, Content)) == GOOD
    thought = "Hm" in "".join(e.text for e in events if isinstance(e, Reasoning))
    assert thought == ("Hm" in before)


@pytest.mark.parametrize("dialect", [Plain(), QwenCoder(), Llama31()])
def test_where_the_content_is_all_the_schema_alone_does(model: Model, dialect: Dialect) -> None:
    assert dialect.answer_grammar(SCHEMA, is_token=model.is_token) is None
