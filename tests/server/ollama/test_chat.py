"""Ollama's own Python client against a real server: its assumptions hold."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from api_clients import of_ollama, ollama
from chat_models import NOW, WEATHER
from dflash_local import Model
from openai_api import CERTAIN, QUESTION, SAMPLER, user
from server_process import ServerProcess

NAME = "tiny-coder-q8_0:latest"
TOOLS = "tiny-tools:latest"
GREEDY = {"temperature": 0, "num_predict": CERTAIN, "cache_prompt": False}


@pytest.fixture
def api(server: ServerProcess) -> ollama.Client:
    return of_ollama(server)


@pytest.fixture
def tool_api(tool_server: ServerProcess) -> ollama.Client:
    return of_ollama(tool_server)


def wrote(text: str) -> dict[str, Any]:
    """Fields that bind the model to write `text`."""
    return {**GREEDY, "num_predict": 64, "grammar": f"root ::= {json.dumps(text)}"}


def test_a_drawn_answer_is_the_model_s_own(api: ollama.Client, model: Model) -> None:
    options = {"seed": 7, "temperature": 0.8, "num_predict": 24, "cache_prompt": False}
    told = api.chat(NAME, messages=user(QUESTION), options=options)
    own = model.chat(user(QUESTION), max_tokens=24, temperature=0.8, seed=7, **SAMPLER)
    assert told.message.role == "assistant"
    assert told.message.content == own.text
    assert (told.model, told.done, told.done_reason) == (NAME, True, "length")
    assert told.prompt_eval_count == len(model.chat_prompt(user(QUESTION)))
    assert told.eval_count == len(own.tokens)
    parts = (told.load_duration, told.prompt_eval_duration, told.eval_duration)
    assert min(parts) > 0 and told.total_duration >= sum(parts)


def test_the_likeliest_answer_is_the_model_s_own(api: ollama.Client, model: Model) -> None:
    own = model.chat(user(QUESTION), max_tokens=CERTAIN, temperature=0)
    assert api.chat(NAME, messages=user(QUESTION), options=GREEDY).message.content == own.text
    assert api.generate(NAME, QUESTION, options=GREEDY).response == own.text
    raw = api.generate(NAME, "def f(", raw=True, options={**GREEDY, "num_predict": 8})
    assert raw.response == model.generate("def f(", max_tokens=8, temperature=0).text


def test_system_and_prompt_are_a_chat(api: ollama.Client, model: Model) -> None:
    told = api.generate(NAME, QUESTION, system="Be brief.", options=GREEDY)
    spoken = [{"role": "system", "content": "Be brief."}, *user(QUESTION)]
    assert told.prompt_eval_count == len(model.chat_prompt(spoken))


def test_a_last_message_of_the_assistant_begins_the_answer(
    api: ollama.Client, client: httpx.Client
) -> None:
    messages = [*user(QUESTION), {"role": "assistant", "content": "def add(first_number, sec"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": CERTAIN}
    expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    told = api.chat(NAME, messages=messages, options=GREEDY)
    assert told.message.content == expected["content"]
    assert not told.message.content.startswith("def")


def test_a_gap_is_filled(api: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": 8}
    told = api.generate(NAME, "def add(a, b):\n", suffix="\n\nprint(add(1, 2))", options=options)
    assert (told.response or "").strip()


def test_the_format_binds_the_answer(api: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": 100}
    schema = {"const": {"word": "two"}}
    for told in (
        api.chat(NAME, messages=user("Go"), format=schema, options=options).message.content,
        api.generate(NAME, "Go", format=schema, options=options).response,
        api.generate(NAME, "Go", format=schema, raw=True, options=options).response,
    ):
        assert json.loads(told) == {"word": "two"}
    few = {**options, "num_predict": 8}
    free = api.chat(NAME, messages=user("Go"), format="json", options=few).message.content
    assert (free or "").startswith("{")


def test_a_stop_text_ends_the_answer(api: ollama.Client) -> None:
    options = {**wrote("one END two"), "stop": ["END"]}
    told = api.chat(NAME, messages=user(QUESTION), options=options)
    assert (told.message.content, told.done_reason) == ("one ", "stop")


def test_without_a_question_the_model_is_there(api: ollama.Client) -> None:
    assert api.chat(NAME).done_reason == "load"
    assert api.generate(NAME, keep_alive=0).done_reason == "load"


# Tools and reasoning.

CALLS = "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    for name, arguments in (("get_weather", {"city": "Rome"}), ("now", {}))
)


def test_tools_are_called_and_their_results_go_back_in(tool_api: ollama.Client) -> None:
    asked: dict[str, Any] = {"messages": user("What is the weather?"), "tools": [WEATHER, NOW]}
    told = tool_api.chat(TOOLS, **asked, options={**wrote(CALLS), "num_predict": 100})
    made = [(call.function.name, call.function.arguments) for call in told.message.tool_calls or ()]
    assert made == [("get_weather", {"city": "Rome"}), ("now", {})]
    assert (told.message.content, told.done_reason) == ("", "stop")
    pieces = tool_api.chat(
        TOOLS, **asked, options={**wrote(CALLS), "num_predict": 100}, stream=True
    )
    streamed = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert streamed == told.message.tool_calls
    result = {"role": "tool", "tool_name": "get_weather", "content": "It rains."}
    turn = [*asked["messages"], told.message, result]
    after = tool_api.chat(TOOLS, messages=turn, tools=asked["tools"], options=GREEDY)
    assert (after.prompt_eval_count or 0) > (told.prompt_eval_count or 0)


def test_a_call_that_is_cut_off_is_no_call(tool_api: ollama.Client) -> None:
    options = {**wrote(CALLS), "num_predict": 20}
    told = tool_api.chat(
        TOOLS, messages=user("What is the weather?"), tools=[WEATHER], options=options
    )
    assert told.done_reason == "length"
    assert not told.message.tool_calls


def test_what_the_model_thinks_is_told_apart(tool_api: ollama.Client) -> None:
    options = wrote("<think>\nOh\n</think>\n\nTwo")
    told = tool_api.chat(TOOLS, messages=user(QUESTION), think=True, options=options)
    assert (told.message.thinking, told.message.content) == ("Oh", "Two")
    pieces = list(tool_api.generate(TOOLS, QUESTION, think="low", options=options, stream=True))
    assert "".join(piece.thinking or "" for piece in pieces) == "Oh"
    assert "".join(piece.response or "" for piece in pieces) == "Two"
    unasked = tool_api.chat(TOOLS, messages=user(QUESTION), think=False, options=options)
    assert (unasked.message.thinking, unasked.message.content) == (None, "Two")
    assert (unasked.prompt_eval_count or 0) > (told.prompt_eval_count or 0)  # an empty part


# Models, and what goes wrong.


def test_the_model_is_listed_and_shown(
    api: ollama.Client, tool_api: ollama.Client, model: Model
) -> None:
    [listed] = api.list().models
    [running] = api.ps().models
    assert listed.model == running.model == running.name == NAME
    assert listed.digest == running.digest
    assert listed.size == model.target.path.stat().st_size
    assert (listed.details.family, listed.details.quantization_level) == ("qwen3", "Q8_0")
    assert running.context_length == model.n_ctx * 2  # served as everybody gets it
    for name in (NAME, NAME.removesuffix(":latest")):
        shown = api.show(name)
        assert shown.template == model.target.chat_template
        architecture = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{architecture}.context_length"] == running.context_length
        assert shown.capabilities == ["completion", "insert"]
    [tools] = tool_api.list().models
    assert {"tools", "thinking"} <= set(tool_api.show(tools.model).capabilities or ())


def test_what_goes_wrong_is_an_exception(api: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="is served here") as missing:
        api.show("another")
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="context size"):
        list(api.chat(NAME, messages=user("a b c d " * 100_000), stream=True))


# What Ollama's clients send besides.

ASKED = {"model": NAME, "messages": user(QUESTION), "stream": False, "options": GREEDY}
CURL_S_OWN = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize("headers", [{}, CURL_S_OWN], ids=["no type", "curl -d"])
def test_a_body_needs_no_content_type(client: httpx.Client, headers: dict[str, str]) -> None:
    body = json.dumps(ASKED)
    answer = client.post("/api/chat", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["done"]
    assert client.post("/api/show", content='{"model": "no"}', headers=headers).status_code == 404
    refused = client.post("/api/chat", content=body[:-1], headers=headers)
    assert refused.status_code == 400 and "JSON" in refused.json()["error"]


def test_a_page_s_body_needs_its_content_type(client: httpx.Client) -> None:
    headers = {**CURL_S_OWN, "Origin": "http://localhost:3000"}
    answer = client.post("/api/chat", content=json.dumps(ASKED), headers=headers)
    assert answer.status_code == 415
    answer = client.post("/v1/completions", content="{}", headers=CURL_S_OWN)
    assert answer.status_code == 415


def test_log_probabilities_are_told_with_their_text(api: ollama.Client) -> None:
    body = {"messages": user(QUESTION), "options": GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = api.chat(NAME, **body)
    assert "".join(each.token for each in whole.logprobs) == whole.message.content
    for each in whole.logprobs:
        assert each.top_logprobs is not None and len(each.top_logprobs) == 2
        assert each.logprob == each.top_logprobs[0].logprob <= 0
    pieces = list(api.chat(NAME, **body, stream=True))
    told = [each.token for piece in pieces for each in piece.logprobs or ()]
    assert "".join(told) == whole.message.content


def test_context_goes_on_from_an_earlier_answer(api: ollama.Client, model: Model) -> None:
    first = api.generate(NAME, QUESTION, options=GREEDY)
    prompt = model.chat_prompt(user(QUESTION))
    assert first.context is not None and list(first.context[: len(prompt)]) == prompt
    assert len(first.context) == len(prompt) + (first.eval_count or 0)
    again = api.generate(NAME, "Thanks", context=first.context, options=GREEDY)
    asked = [*first.context, *model.chat_prompt(user("Thanks"))]
    assert again.prompt_eval_count == len(asked)
    assert again.response == model.generate(asked, max_tokens=CERTAIN, temperature=0).text
