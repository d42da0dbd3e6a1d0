"""`/v1/chat/completions` as OpenAI's clients use it, against a real server."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import tiny_coder
from dflash_local import Model
from dflash_local.engine.engine import Engine
from dflash_local.llama import runtime
from dflash_local.server.openai.chat import AssistantMessage, PlainMessage, ToolMessage
from dflash_local.server.openai.responses import FunctionCallOutput, InputMessage
from gap_rule import equal_by_gap_rule, joint_noise
from openai_api import CHAT, QUESTION, SAMPLER, ask, post, refused, streamed, user
from pair_engine import open_engine
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


@pytest.mark.slow
def test_answers_at_once_are_each_what_they_are_alone(client: httpx.Client) -> None:
    """They part only where the target was undecided: by more than that, slots would be mixed up."""
    questions = [QUESTION, "What is a list?", "Hi", "Explain how to sort " + "a, b, c, " * 30]
    lengths = [40, 24, 12, 32]

    def bytes_of(question: str, n: int) -> list[tuple[int, ...]]:
        told = ask(client, question, max_tokens=n, temperature=0, logprobs=True)
        return [tuple(e["bytes"]) for e in told["choices"][0]["logprobs"]["content"]]

    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(bytes_of, questions, lengths))
    with (
        open_engine(path=tiny_coder.pair()[0], n_ctx=1024, n_seq=len(questions)) as engine,
        Model(Engine(engine.target, None, len(questions))) as plain,
    ):
        prompts = [plain.chat_prompt(user(question)) for question in questions]
        alone = [
            plain.generate(prompt, max_tokens=n, logprobs=2)
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        plain.forget()
        piece = engine.target.vocabulary.piece
        for own, told in zip(alone, together, strict=True):
            expected = [tuple(piece(token)) for token in own.tokens if piece(token)]
            ids = {text: n for n, text in enumerate({*expected, *told})}
            equal_by_gap_rule(
                [ids[text] for text in expected],
                own.logprobs,
                [ids[text] for text in told],
                lambda: joint_noise(
                    engine.target, prompts, [a.tokens for a in alone], [8, 8, 8, 8]
                ),
            )


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


def test_stop_texts_end_the_answer_before_them(client: httpx.Client) -> None:
    text = content(ask(client, max_tokens=24, temperature=0))
    stop = text[len(text) // 2 :][:4]
    told = ask(client, max_tokens=24, temperature=0, stop=stop)
    assert content(told) == text[: text.index(stop)]
    assert told["choices"][0]["finish_reason"] == "stop"
    several = ["nowhere", "to be", "found", "at all", stop]
    told = ask(client, max_tokens=24, temperature=0, stop=several, include_stop_str_in_output=True)
    assert content(told) == text[: text.index(stop)] + stop
    assert told["choices"][0]["finish_reason"] == "stop"


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


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object", "schema": {"const": {"a": [1]}}}},
        {"json_schema": {"const": {"a": [1]}}},
        {"grammar": 'root ::= "{\\"a\\": [1]}"'},
    ],
)
def test_llama_server_s_ways_to_bind_an_answer(client: httpx.Client, body: dict[str, Any]) -> None:
    assert json.loads(content(ask(client, max_tokens=96, temperature=0, **body))) == {"a": [1]}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("older", [False, True], ids=["structured_outputs", "guided_..."])
@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ({"json": {"const": {"a": [1]}}}, ('{"a": [1]}',)),
        ({"json": '{"const": 7}'}, ("7",)),
        ({"choice": ["left/right", 'up"down']}, ("left/right", 'up"down')),
        ({"regex": "^a/[0-1]\\/b$"}, ("a/0/b", "a/1/b")),
        ({"grammar": 'root ::= "yes"'}, ("yes",)),
        ({"grammar": 'start: "no"'}, ("no",)),
    ],
)
def test_vllm_s_ways_to_bind_an_answer(
    client: httpx.Client, bound: dict[str, Any], expected: tuple[str, ...], older: bool
) -> None:
    body = {"structured_outputs": bound}
    if older:
        body = {f"guided_{name}": value for name, value in bound.items()}
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


@pytest.mark.parametrize(
    ("messages", "flags", "words"),
    [
        ([*user("a"), BEGUN], {"add_generation_prompt": True}, "contradict"),
        (user("a"), {}, "last message of the assistant"),
        ([BEGUN], {}, "after one of the user"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
def test_flags_that_contradict_each_other(
    client: httpx.Client, path: str, messages: Any, flags: dict[str, Any], words: str
) -> None:
    error = refused(client, path, messages=messages, continue_final_message=True, **flags)
    assert error["param"] == "continue_final_message" and words in error["message"]


def test_one_message_alone_begins_an_answer(client: httpx.Client) -> None:
    messages = [*user(QUESTION), BEGUN, BEGUN]
    assert "both of the assistant" in refused(client, CHAT, messages=messages)["message"]
    for flag in (True, False):
        told = prompt_of(client, messages=messages, continue_final_message=flag)
        assert told.count(BEGUN["content"]) == 2


def test_only_free_text_can_be_begun(client: httpx.Client) -> None:
    bound = {"messages": [*user("a"), BEGUN], "response_format": {"type": "json_object"}}
    assert "free text" in refused(client, CHAT, **bound)["message"]
    thought = {**BEGUN, "reasoning_content": "Hm."}
    assert "reasoning" in refused(client, CHAT, messages=[*user("a"), thought])["message"]


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
    refused(tool_client, CHAT, messages=user("a"), reasoning_budget_tokens=-2)


REGEX = {"structured_outputs": {"regex": "a"}}


def parts(*given: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*user("a"), {"role": "user", "content": list(given)}]}


@pytest.mark.one_in(31)
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": None}, "messages", "list"),
        ({"messages": [{"role": 3, "content": "a"}]}, "messages[0].role", "string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
        (parts({"type": "image_url"}), "messages[1].content[0].image_url", "required"),
        (parts({"type": "input_audio"}), "messages[1].content[0]", "input_audio"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "integer"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities", "text"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"mirostat": 2}, "mirostat", "no such setting"),
        ({"min_tokens": -4}, "min_tokens", "0"),
        ({"stop_token_ids": ["3"]}, "stop_token_ids[0]", "integer"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "boolean"),
        ({"typical_p": 2.0}, "typical_p", "1"),
        ({"n_probs": 101}, "n_probs", "100"),
        ({"guided_choice": []}, "choice", "1"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "both"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.struc", "None"),
        ({**REGEX, "response_format": {"type": "json_object"}}, "structured_outputs", "give one"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "custom"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    error = refused(client, CHAT, **{"messages": user("hi"), **body})
    assert error["param"].startswith(param)
    assert words in error["message"]


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


def test_a_schema_that_is_none_is_refused(client: httpx.Client) -> None:
    given = {"name": "x", "schema": {"type": "no such type"}}
    body = {"response_format": {"type": "json_schema", "json_schema": given}}
    assert "json_schema" in refused(client, CHAT, messages=user("hi"), **body)["message"]


def test_a_call_that_the_model_cannot_make_is_refused(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = refused(client, CHAT, messages=user("hi"), tools=tools, tool_choice="required")
    assert error["param"] == "tool_choice"
    assert "no tool calls" in error["message"]


def test_what_is_wrong_with_a_stream_is_told_before_it_begins(client: httpx.Client) -> None:
    error = refused(
        client, CHAT, messages=user("hi"), stream=True, grammar="no grammar", max_tokens=4
    )
    assert "grammar" in error["message"]
