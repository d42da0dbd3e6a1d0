"""Grammars of calls in the forms of many models let the calls of their templates through."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dflash_local.chat.families import dialect_of
from dflash_local.chat.form import ID
from dflash_local.chat.tool import Tool
from forced_grammar import Forced
from model_templates import (
    REFUSED,
    ROME,
    TEMPLATES,
    TOOLS,
    WITHOUT_TOOLS,
    WRITE_NO_CALLS,
    written,
)

# llguidance's own reading of the vocabulary.
pytestmark = pytest.mark.filterwarnings("ignore:llama_token_get_attr")

SEVERAL = ("get_weather_now", {"city": "New York [x] {y}", "days": 3, "share": -0.5})
# Its template spreads a call over lines; a forced one is on one line.
SPREAD = "CohereForAI-c4ai-command-r-plus-tool_use"
WITH_FORM = sorted(TEMPLATES.keys() - WITHOUT_TOOLS - REFUSED - {"openai-gpt-oss-120b", SPREAD})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WITH_FORM)
def test_the_template_s_calls_are_let_through(forced: Forced, name: str) -> None:
    dialect = replace(dialect_of(TEMPLATES[name]), thinking=None)
    settings = {"is_token": forced.model.is_token, "thinking_open": False}
    form, grammar = dialect.form, dialect.call_grammar(TOOLS, parallel=True, **settings)
    assert form is not None
    lets_through = partial(forced.lets_through, grammar)
    assert not lets_through("Hello")
    for calls in ([ROME], [SEVERAL], [ROME, SEVERAL]):
        if (len(calls) > 1 and form.is_bare) or (name in WRITE_NO_CALLS and calls != [ROME]):
            continue
        text = WRITE_NO_CALLS.get(name) or written(TEMPLATES[name], calls, "", "")[0]
        begin = text.index(form.head.split(ID)[0].strip() or form.begin.strip())
        close = form.tail.strip() or form.end.split(ID)[-1].strip()
        end = text.rindex(close) + len(close)
        assert lets_through(text[begin:end]), text[begin:end]
        assert not lets_through(text[begin:end].replace("get_weather", "get_whatever"))


@pytest.mark.parametrize(
    "name", ["ByteDance-Seed-OSS", "LFM2-8B-A1B", "google-gemma-4-31B-it-interleaved"]
)
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": True}, "required": ["a"]},
        {"properties": {"a": 1}},
        {"properties": {"a": None}, "required": "a"},
        {"properties": {"a": {"type": "integer"}}, "required": 5},
        {"properties": [1]},
        {"properties": "a"},
    ],
    ids=str,
)
def test_schemas_of_any_value_and_malformed_ones_make_a_grammar(
    forced: Forced, name: str, parameters: dict[str, Any]
) -> None:
    """In the forms whose arguments are not in JSON."""
    grammar = dialect_of(TEMPLATES[name]).call_grammar(
        [Tool("now", None, {"type": "object", **parameters})],
        parallel=True,
        is_token=lambda _: False,
        thinking_open=False,
    )
    assert not forced.lets_through(grammar, "Hello")
