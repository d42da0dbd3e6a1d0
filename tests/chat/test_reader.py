"""Chats from Python: content, reasoning and calls of tools, in one piece and as a stream."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

import mini_pair
from chat_models import HELLO, NOW, WEATHER, template, with_template
from dflash_local import InputError, Model, Result, load
from dflash_local.chat.families import dialect_of
from dflash_local.chat.tool import Tool


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Model]]:
    """Gives the mini target with the template of a family."""
    folder = tmp_path_factory.mktemp("families")
    with ExitStack() as stack:

        @cache
        def opened(family: str) -> Model:
            path = with_template(mini_pair.pair()[0], folder / f"{family}.gguf", family)
            return stack.enter_context(load(path, n_ctx=1024, n_threads=1, quiet=True))

        yield opened


@pytest.fixture(params=["qwen3", "harmony"])
def speaker(request: pytest.FixtureRequest, speakers: Callable[[str], Model]) -> Model:
    return speakers(request.param)


@pytest.fixture
def qwen3(speakers: Callable[[str], Model]) -> Model:
    return speakers("qwen3")


def same_shape(result: Result) -> dict[str, Any]:
    """The message, without the ids of calls, which are new each time."""
    message = dict(result.message)
    message["tool_calls"] = [call["function"] for call in message.get("tool_calls", ())]
    return message


@pytest.mark.slow
def test_a_call_that_must_come(speaker: Model) -> None:
    asked: dict[str, Any] = {
        "tools": [WEATHER, NOW],
        "tool_choice": "get_weather",
        "temperature": 0,
    }
    result = speaker.chat(HELLO, max_tokens=400, **asked)
    call = result.tool_calls[0]
    assert call["type"] == "function" and call["function"]["name"] == "get_weather"
    assert "city" in json.loads(call["function"]["arguments"])
    # The conversation goes on with it.
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    longer = [*HELLO, result.message, answer]
    assert len(speaker.chat_prompt(longer, [WEATHER])) > len(speaker.chat_prompt(HELLO, [WEATHER]))


@pytest.mark.one_in(2)
def test_a_stream_has_what_the_whole_answer_has(speaker: Model) -> None:
    asked: dict[str, Any] = {"max_tokens": 48, "temperature": 0}
    whole = speaker.chat(HELLO, **asked)
    chunks = list(speaker.stream_chat(HELLO, **asked))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert ("".join(chunk.reasoning for chunk in chunks) or None) == whole.reasoning
    assert chunks[-1].result is not None
    assert same_shape(chunks[-1].result) == same_shape(whole)

    async def later() -> Result:
        return await speaker.achat(HELLO, **asked)

    assert same_shape(asyncio.run(later())) == same_shape(whole)


def test_a_model_with_a_family_s_template_speaks_its_dialect(qwen3: Model) -> None:
    assert qwen3.dialect == dialect_of(template("qwen3"))
    prompt = qwen3.chat_prompt(HELLO, [WEATHER])
    assert "get_weather" in qwen3.detokenize(prompt)
    assert not qwen3.thinking_open(prompt)
    assert qwen3.thinking_open(prompt + qwen3.tokenize("<think>\n"))


def test_reasoning_is_apart_from_the_answer(qwen3: Model) -> None:
    grammar = 'root ::= "<think>I add them.</think>def add(a, b):"'
    result = qwen3.chat(HELLO, grammar=grammar, max_tokens=64)
    assert (result.content, result.reasoning) == ("def add(a, b):", "I add them.")
    assert result.message["reasoning_content"] == "I add them."


@pytest.mark.parametrize("choice", ["sometimes", "nonesuch"])
def test_a_choice_that_is_none_of_the_tools_is_refused(model: Model, choice: str) -> None:
    with pytest.raises(InputError, match="tool_choice"):
        model.chat(HELLO, tools=[WEATHER], tool_choice=choice)
    with pytest.raises(InputError, match="tool_choice"):
        model.chat(HELLO, tool_choice="required")


def test_a_model_without_calls_cannot_be_made_to_call(model: Model) -> None:
    with pytest.raises(InputError, match="no tool calls"):
        model.chat(HELLO, tools=[Tool("now")], tool_choice="required")


@pytest.mark.parametrize("likely", ["{", "<tool_call>"])
def test_with_tools_and_a_schema_the_answer_is_a_call_or_of_the_schema(
    qwen3: Model, likely: str
) -> None:
    result = qwen3.chat(
        HELLO,
        tools=[NOW],
        json_schema={"const": {"a": 1}},
        # The model would do neither.
        logit_bias={qwen3.tokenize(likely)[0]: 30},
        chat_template_kwargs={"enable_thinking": False},
        max_tokens=200,
        temperature=0,
    )
    if likely == "{":
        assert json.loads(result.content or "") == {"a": 1}
    else:
        assert result.tool_calls[0]["function"]["name"] == "now"


@pytest.mark.one_in(2)
def test_thoughts_end_after_their_budget(speaker: Model) -> None:
    """Then the answer begins, drafted or not, and with a message before it where one is given."""
    marks = speaker.dialect.thinking
    assert marks is not None
    asked: dict[str, Any] = {
        "max_tokens": 48,
        "temperature": 0.9,
        "seed": 3,
        "lark": rf"start: {json.dumps(marks[0])} /(.|\n){{200}}(.|\n)*/",
    }
    unlimited = speaker.chat(HELLO, draft_width=0, **asked)
    assert unlimited.reasoning and not unlimited.content
    told: list[Result] = []
    for message in ("", "Enough."):
        asked |= {"reasoning_budget": 8, "reasoning_budget_message": message}
        plain, drafted = (speaker.chat(HELLO, draft_width=n, **asked) for n in (0, 4))
        assert plain.tokens == drafted.tokens and same_shape(plain) == same_shape(drafted)
        told.append(plain)
    short, stopped = told
    assert unlimited.reasoning.startswith(short.reasoning or "-") and short.content
    assert stopped.reasoning == f"{short.reasoning}Enough."
    speaker.reasoning_budget = 8
    try:
        usual = speaker.chat(HELLO, **{**asked, "reasoning_budget": None})
        assert same_shape(usual) == same_shape(stopped)
        assert speaker.chat(HELLO, **{**asked, "reasoning_budget": -1}).text == unlimited.text
    finally:
        speaker.reasoning_budget = None
    with pytest.raises(InputError, match="reasoning_budget is -2"):
        speaker.chat(HELLO, reasoning_budget=-2)


def test_what_binds_an_answer_leaves_its_thoughts_their_budget() -> None:
    """A schema binds what follows the thoughts, which the prompt has begun here; their end is not
    forced into a text that a grammar binds from its beginning on."""
    begun = template("qwen3").replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    options: dict[str, Any] = {"max_tokens": 160, "temperature": 0, "reasoning_budget": 4}
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    target = mini_pair.pair()[0]
    with load(target, chat_template=begun, n_ctx=512, n_threads=1, quiet=True) as model:
        assert model.thinking_open(model.chat_prompt(HELLO))
        told = model.chat(HELLO, json_schema=schema, **options)
        assert told.reasoning and json.loads(told.content or "")["n"] in (1, 2)
        forms = {"grammar": r'root ::= "{" [^"]{60} "}"', "lark": r'start: "{" /[^"]{60}/ "}"'}
        for kind, grammar in forms.items():
            text = model.chat(HELLO, **{kind: grammar}, **options).text
            assert text.startswith("{") and "</think>" not in text
        with pytest.raises(InputError, match="json_schema is \\[1\\]"):
            model.chat(HELLO, json_schema=[1])  # type: ignore[arg-type]
        both: dict[str, Any] = {"json_schema": schema, "tools": [NOW], "tool_choice": "now"}
        for more in ({}, {"lark": forms["lark"], "tool_choice": "auto"}):
            with pytest.raises(InputError, match="are both given"):
                model.chat(HELLO, **{**both, **more})
