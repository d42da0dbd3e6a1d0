"""`/v1/chat/completions` as OpenAI's clients use it, against a real server."""

import json
import re
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from dflash_local import Model
from dflash_local.llama import runtime
from dflash_local.server.openai.chat import AssistantMessage, PlainMessage, ToolMessage
from dflash_local.server.openai.responses import FunctionCallOutput, InputMessage
from openai_api import CHAT, QUESTION, SAMPLER, ask, post, streamed, user
from server_process import ServerProcess


def content(answer: dict[str, Any], index: int = 0) -> str:
    text = answer["choices"][index]["message"]["content"]
    assert isinstance(text, str)
    return text


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0.8, "seed": 7}, {}),
        ({"temperature": 0.8, "seed": 2**40 + 5}, {"seed": (2**40 + 5) % (2**32 - 1)}),
        ({"temperature": 0.7, "seed": 5, "top_k": 0, "min_p": 0.1}, {"repeat_penalty": 1.3}),
    ],
)
def test_an_answer_is_the_model_s_own(
    client: httpx.Client, model: Model, body: dict[str, Any], options: dict[str, Any]
) -> None:
    penalty = options.get("repeat_penalty")
    told = ask(client, max_tokens=24, **body, repetition_penalty=penalty)
    model.forget()
    own = model.chat(user(QUESTION), max_tokens=24, **{**SAMPLER, **body, **options})
    assert content(told) == own.text
    assert told["choices"][0]["finish_reason"] == own.finish_reason
    assert told["usage"]["completion_tokens"] == len(own.tokens)
    assert told["usage"]["prompt_tokens"] == len(model.chat_prompt(user(QUESTION)))


def test_the_usage_of_a_stream_comes_in_a_chunk_without_choices(client: httpx.Client) -> None:
    body = {"messages": user(QUESTION), "max_tokens": 8, "n": 2}
    *chunks, last = streamed(client, CHAT, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"]
    assert last["usage"]["total_tokens"] == (
        last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    )
    ended = [c for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(c["choices"][0]["index"] for c in ended) == [0, 1]


def test_tools_that_the_template_leaves_out_are_told(
    client: httpx.Client, server: ServerProcess
) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert "left out" in ask(client, max_tokens=1, tools=tools)["warning"]
    assert "warning" not in ask(client, max_tokens=1)
    server.wait_for("warning: .*the tools of this request were left out")


@pytest.mark.slow
def test_a_seed_gives_the_same_answer_and_no_seed_another(client: httpx.Client) -> None:
    def told(**body: Any) -> tuple[str, str]:
        answer = ask(client, temperature=2, top_k=0, min_p=0, top_p=1, max_tokens=16, **body)
        return content(answer), answer["system_fingerprint"]

    assert told(seed=1) == told(seed=1)
    assert len({told(), told(), told(seed=-1), told(seed=-1)}) == 4


def test_costs(client: httpx.Client) -> None:
    text = "Name the parts of a bicycle, one after the other, please."
    body = {"max_tokens": 24, "temperature": 0, "cache_prompt": True}
    first, again = (ask(client, text, **body) for _ in range(2))
    for told in (first, again):
        usage, timings = told["usage"], told["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["predicted_n"] == usage["completion_tokens"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
        assert timings["predicted_per_second"] > 0
    assert again["timings"]["prompt_n"] == 1
    assert ask(client, text, **{**body, "cache_prompt": False})["timings"]["cache_n"] == 0


def test_logprobs_are_the_model_s(client: httpx.Client, model: Model) -> None:
    told = ask(client, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3)
    model.forget()
    own = model.chat(user(QUESTION), max_tokens=8, logprobs=3)
    entries = told["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(own.logprobs)

    def piece(token: int) -> bytes:
        return model.target.vocabulary.piece(token, special=True)

    for entry, expected in zip(entries, own.logprobs, strict=True):
        assert bytes(entry["bytes"]) == piece(expected.token) == entry["token"].encode()
        assert entry["logprob"] == pytest.approx(expected.logprob, abs=1e-6)
        tops = [(bytes(top["bytes"]), top["logprob"]) for top in entry["top_logprobs"]]
        assert [text for text, _ in tops] == [piece(token) for token, _ in expected.top]
        assert [lp for _, lp in tops] == pytest.approx([lp for _, lp in expected.top], abs=1e-6)


A_LIST = ('{"a": [1]}',)
WAYS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"json": {"const": {"a": [1]}}}, A_LIST),
    ({"json": '{"const": 7}'}, ("7",)),
    ({"choice": ["left/right", 'up"down']}, ("left/right", 'up"down')),
    ({"regex": "^a/[0-1]\\/b$"}, ("a/0/b", "a/1/b")),
    ({"grammar": 'root ::= "yes"'}, ("yes",)),
    ({"grammar": 'start: "no"'}, ("no",)),
]
"""vLLM's, in its newer form."""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        *(({"structured_outputs": way}, found) for way, found in WAYS),
        *(({f"guided_{name}": way[name] for name in way}, found) for way, found in WAYS),
        ({"response_format": {"type": "json_object", "schema": {"const": {"a": [1]}}}}, A_LIST),
        ({"json_schema": {"const": {"a": [1]}}}, A_LIST),
        ({"grammar": 'root ::= "{\\"a\\": [1]}"'}, A_LIST),
    ],
)
def test_vllm_s_and_llama_server_s_ways_to_bind_an_answer(
    client: httpx.Client, body: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert content(ask(client, max_tokens=96, temperature=0, **body)) in expected


def test_alternatives_by_llama_server_s_name(client: httpx.Client) -> None:
    told = ask(client, max_tokens=3, temperature=0, n_probs=4)["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in told] == [4, 4, 4]
    told = ask(client, max_tokens=3, temperature=0, n_probs=0)
    assert told["choices"][0]["logprobs"] is None


def test_each_chunk_tells_its_usage_and_time_where_asked(client: httpx.Client) -> None:
    body = {"messages": user(QUESTION), "max_tokens": 12, "timings_per_token": True}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(client, CHAT, **body, temperature=0, stream_options=usage)
    told = [chunk["usage"] for chunk in chunks if chunk["usage"]]
    counts = [each["completion_tokens"] for each in told]
    assert len(told) > 1 and counts == sorted(counts)
    whole = last["usage"]
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in told)
    ends = {name: whole[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert told[-1] == ends
    times = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    assert [time["predicted_n"] for time in times] == counts
    plain = streamed(client, CHAT, messages=user(QUESTION), max_tokens=12, temperature=0)
    assert ["timings" in chunk for chunk in plain] == [False] * (len(plain) - 1) + [True]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_stream_tells_how_much_of_the_prompt_is_read_where_asked(
    client: httpx.Client, path: str
) -> None:
    body = {"max_tokens": 4, "temperature": 0, "return_progress": True, "cache_prompt": False}
    body |= {"messages": user(QUESTION)} if path == CHAT else {"prompt": QUESTION}
    chunks = streamed(client, path, **body, stream_options={"include_usage": True})
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    n = chunks[-1]["usage"]["prompt_tokens"]
    assert {each["total"] for each in told} == {n}
    assert (told[0]["processed"], told[-1]["processed"]) == (0, n)


def test_a_json_object_is_one(client: httpx.Client) -> None:
    told = ask(client, response_format={"type": "json_object"}, max_tokens=16, temperature=0)
    assert told["choices"][0]["finish_reason"] == "length" or isinstance(
        json.loads(content(told)), dict
    )
    assert content(told).startswith("{")


@pytest.mark.parametrize(
    ("body", "n"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 5, "max_tokens": 3}, 5),
        ({"max_tokens": None, "max_completion_tokens": 4}, 4),
        ({"max_tokens": -1, "stop": "("}, None),
    ],
)
def test_how_long_an_answer_may_be(
    client: httpx.Client, body: dict[str, Any], n: int | None
) -> None:
    told = ask(client, temperature=0, **body)
    if n is None:
        assert told["choices"][0]["finish_reason"] == "stop"
    else:
        assert told["usage"]["completion_tokens"] == n
        assert told["choices"][0]["finish_reason"] == "length"


def test_what_a_message_may_be(client: httpx.Client) -> None:
    """Parts of text are its lines; fields that change no answer are ignored; any model is taken."""
    expected = content(ask(client, "Hello\n" + QUESTION, max_tokens=8, temperature=0))
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": parts, "name": "anna"}]
    ignored = {"user": "someone", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    ignored |= {"reasoning_effort": "low", "no_such_field": [1, 2]}
    ignored |= dict.fromkeys(("stop", "tools", "top_p"))
    asked = {"model": "gpt-4o", "messages": messages, "max_tokens": 8, "temperature": 0}
    told = post(client, CHAT, **asked, **ignored)
    assert content(told) == expected
    assert told["model"] == "tiny-coder-q8_0"


# Answers that the client begins.

BEGUN = {"role": "assistant", "content": "def add(a, "}


def prompt_of(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/apply-template", json=body)
    assert answer.status_code == 200, answer.text
    prompt = answer.json()["prompt"]
    assert isinstance(prompt, str)
    return prompt


def test_a_role_may_be_one_that_only_the_template_knows(client: httpx.Client) -> None:
    asked = prompt_of(client, messages=[*user(QUESTION), {"role": "critic", "content": "Really?"}])
    assert "critic" in asked and "Really?" in asked


def test_parts_that_begin_the_answer_are_paragraphs(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": part} for part in ("def", "add")]
    begun = {"role": "assistant", "content": parts}
    asked = prompt_of(client, messages=user(QUESTION))
    assert prompt_of(client, messages=[*user(QUESTION), begun]) == asked + "def\n\nadd"


def test_a_last_message_of_the_assistant_begins_the_answer(client: httpx.Client) -> None:
    messages = [*user(QUESTION), BEGUN]
    asked = prompt_of(client, messages=user(QUESTION))
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert prompt_of(client, messages=messages, **more) == asked + BEGUN["content"]
        told = post(client, CHAT, messages=messages, max_tokens=8, temperature=0, **more)
        raw = client.post(
            "/completion",
            json={"prompt": asked + BEGUN["content"], "n_predict": 8, "temperature": 0},
        ).json()
        assert content(told) == raw["content"]
    parts = {**BEGUN, "content": [{"type": "text", "text": BEGUN["content"]}]}
    assert prompt_of(client, messages=[*user(QUESTION), parts]) == asked + BEGUN["content"]


def test_a_last_message_may_be_complete(client: httpx.Client) -> None:
    messages = [*user(QUESTION), BEGUN]
    whole = prompt_of(client, messages=messages, add_generation_prompt=False)
    asked = prompt_of(client, messages=user(QUESTION), add_generation_prompt=False)
    head = prompt_of(client, messages=user(QUESTION)).removeprefix(asked)
    assert head and whole.startswith(asked + head + BEGUN["content"])
    after = prompt_of(client, messages=messages, continue_final_message=False)
    assert after == whole + head


def test_who_says_whether_to_go_on_may_end_with_two_messages(client: httpx.Client) -> None:
    messages = [*user(QUESTION), BEGUN, BEGUN]
    for flag in (True, False):
        told = prompt_of(client, messages=messages, continue_final_message=flag)
        assert told.count(BEGUN["content"]) == 2


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_the_tokens_of_a_prompt_are_counted(client: httpx.Client, model: Model, path: str) -> None:
    given = {"messages": user(QUESTION)} if path == CHAT else {"input": QUESTION}
    told = post(client, f"{path}/input_tokens", **given)
    n = len(model.chat_prompt(user(QUESTION)))
    assert told == {"object": "response.input_tokens", "input_tokens": n}
    most = {"max_tokens": 1} if path == CHAT else {"max_output_tokens": 1}
    usage = post(client, path, **given, **most)["usage"]
    assert usage.get("input_tokens", usage.get("prompt_tokens")) == n
    if path != CHAT:
        details = usage["input_tokens_details"]
        assert details["cached_tokens"] + details["cache_write_tokens"] == n


def test_verbose_tells_the_prompt(client: httpx.Client) -> None:
    assert QUESTION in ask(client, max_tokens=1, verbose=True)["__verbose"]["prompt"]
    assert "__verbose" not in ask(client, max_tokens=1)


def test_a_fingerprint_begins_with_the_version_of_llama_cpp(client: httpx.Client) -> None:
    found = ask(client, max_tokens=1)["system_fingerprint"]
    assert re.fullmatch(rf"b{re.escape(runtime.llama_version())}-[0-9a-f]{{12}}", found)


def test_thoughts_end_after_their_budget(tool_client: httpx.Client) -> None:
    """By any of its names; -1 is no limit."""
    thought = {"grammar": r'root ::= "<think>" [a-z]+ "</think>" [a-z]+', "temperature": 0}

    def said(**fields: Any) -> tuple[str, str | None]:
        told = ask(tool_client, max_tokens=40, **thought, **fields)["choices"][0]["message"]
        return told.get("reasoning_content", ""), told["content"]

    thoughts, answer = said(reasoning_budget_tokens=1)
    assert thoughts and answer
    for name in ("thinking_budget_tokens", "reasoning_budget"):
        assert said(**{name: 1}) == (thoughts, answer)
    longer, _ = said(reasoning_budget_tokens=-1)
    assert longer == said()[0] and longer.startswith(thoughts) and len(longer) > len(thoughts)
    message, after = said(reasoning_budget_tokens=1, reasoning_budget_message="enough")
    assert message == f"{thoughts}enough" and after


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (ToolMessage, {"role": "tool", "tool_call_id": "c1"}, "content"),
        (AssistantMessage, {"role": "assistant"}, "content"),
        (PlainMessage, {"role": "user"}, "content"),
        (InputMessage, {"role": "assistant"}, "content"),
        (FunctionCallOutput, {"type": "function_call_output", "call_id": "c1"}, "output"),
    ],
)
def test_content_of_no_parts_is_an_empty_text(
    kind: type[BaseModel], given: dict[str, Any], field: str
) -> None:
    assert getattr(kind.model_validate({**given, field: []}), field) == ""
