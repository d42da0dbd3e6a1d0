"""`/v1/completions` as OpenAI's clients use it, against a real server."""

import json
from typing import Any

import httpx
import pytest

from dflash_local import Model
from openai_api import COMPLETIONS, post, streamed

PROMPT = "def fibonacci(n):\n"
SURE = ["a = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", "import numpy as np\nimport pandas as"]
"""Prompts of which a few tokens come for certain, whoever else is answered with them."""


def text(answer: dict[str, Any], index: int = 0) -> str:
    found = answer["choices"][index]["text"]
    assert isinstance(found, str)
    return found


def complete(client: httpx.Client, **body: Any) -> Any:
    return post(client, COMPLETIONS, **{"prompt": PROMPT, "temperature": 0, **body})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 1.3, "seed": 9, "top_p": 0.9, "top_k": 30, "min_p": 0}],
)
def test_an_answer_is_the_model_s_own(
    client: httpx.Client, model: Model, options: dict[str, Any]
) -> None:
    told = complete(client, max_tokens=32, **options)
    model.forget()
    own = model.generate(PROMPT, max_tokens=32, **options)
    assert text(told) == own.text
    assert told["object"] == "text_completion"
    assert told["usage"]["completion_tokens"] == len(own.tokens)


def test_an_answer_has_16_tokens_unless_told_otherwise(client: httpx.Client) -> None:
    assert complete(client)["usage"]["completion_tokens"] == 16


def test_what_a_prompt_may_be(client: httpx.Client, model: Model) -> None:
    expected = text(complete(client, max_tokens=6))
    ids = model.tokenize(PROMPT)
    for prompt in (ids, [PROMPT], [ids]):
        assert text(complete(client, prompt=prompt, max_tokens=6)) == expected


def test_several_answers_to_each_of_several_prompts(client: httpx.Client, model: Model) -> None:
    ids = [model.tokenize(prompt) for prompt in SURE]
    together = complete(client, prompt=ids, n=2, max_tokens=4)
    alone = [text(complete(client, prompt=prompt, max_tokens=4)) for prompt in SURE]
    assert [text(together, i) for i in range(4)] == [alone[0], alone[0], alone[1], alone[1]]
    assert together["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_puts_the_prompt_before_the_answer(
    client: httpx.Client, model: Model, as_ids: bool
) -> None:
    expected = PROMPT + text(complete(client))
    prompt = model.tokenize(PROMPT) if as_ids else PROMPT
    assert text(complete(client, prompt=prompt, echo=True)) == expected
    chunks = streamed(client, COMPLETIONS, prompt=prompt, temperature=0, echo=True)
    assert "".join(text(chunk) for chunk in chunks) == expected


def test_a_suffix_asks_for_what_is_between(client: httpx.Client, model: Model) -> None:
    """In the order that the model was taught: the prefix, the suffix, then what is between."""
    prefix, suffix = "def area(radius):\n", "\n    return result\n"
    told = complete(client, prompt=prefix, suffix=suffix, max_tokens=12)
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    assert all(len(model.tokenize(mark)) == 1 for mark in marks)
    model.forget()
    own = model.generate(f"{marks[0]}{prefix}{marks[1]}{suffix}{marks[2]}", max_tokens=12)
    assert text(told) == own.text
    assert told["usage"]["prompt_tokens"] == own.stats.prompt_tokens
    named = complete(client, prompt=prefix + marks[2], suffix=suffix, max_tokens=1)
    assert named["usage"]["prompt_tokens"] > own.stats.prompt_tokens + 1  # a name is text here


def test_logprobs_are_the_model_s(client: httpx.Client, model: Model) -> None:
    told = complete(client, logprobs=2, max_tokens=6)["choices"][0]["logprobs"]
    model.forget()
    own = model.generate(PROMPT, logprobs=2, max_tokens=6)
    tokens = [model.target.vocabulary.name(token) for token in own.tokens]
    assert told["tokens"] == tokens
    assert told["token_logprobs"] == pytest.approx([e.logprob for e in own.logprobs], abs=1e-6)
    assert told["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]
    for top, entry in zip(told["top_logprobs"], own.logprobs, strict=True):
        expected = {model.target.vocabulary.name(token): lp for token, lp in entry.top}
        assert top == pytest.approx(expected, abs=1e-6)
    assert complete(client, logprobs=0, max_tokens=2)["choices"][0]["logprobs"]["tokens"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_stream_is_the_whole_answer_in_pieces(client: httpx.Client, kept: bool) -> None:
    stop = text(complete(client, prompt=SURE[0], max_tokens=4))[3:]
    body = {"prompt": SURE, "temperature": 0, "logprobs": 1, "max_tokens": 4, "stop": stop}
    body["include_stop_str_in_output"] = kept
    whole = post(client, COMPLETIONS, **body)
    *chunks, last = streamed(client, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["timings"]["predicted_n"] == last["usage"]["completion_tokens"]
    for index in range(2):
        pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        expected = whole["choices"][index]
        assert expected["text"].endswith(stop) == (kept and expected["finish_reason"] == "stop")
        assert len(pieces) > 1
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        reasons = [piece["finish_reason"] for piece in pieces]
        assert reasons == [None] * (len(pieces) - 1) + [expected["finish_reason"]]
        for key in ("tokens", "text_offset"):
            found = [v for piece in pieces if piece["logprobs"] for v in piece["logprobs"][key]]
            assert found == expected["logprobs"][key]


def test_llama_server_s_and_vllm_s_names(client: httpx.Client) -> None:
    told = complete(client, n_predict=3, n_probs=2)
    assert told["usage"]["completion_tokens"] == 3
    assert [len(top) for top in told["choices"][0]["logprobs"]["top_logprobs"]] == [2, 2, 2]
    assert text(complete(client, guided_choice=["yes"], max_tokens=8)) == "yes"


def test_an_answer_may_be_bound(client: httpx.Client) -> None:
    given = {"type": "json_schema", "json_schema": {"schema": {"enum": [[1, 2]]}}}
    told = complete(client, response_format=given, max_tokens=64)
    assert json.loads(text(told)) == [1, 2]


def test_a_prompt_s_own_log_probabilities(client: httpx.Client, model: Model) -> None:
    """They are those that the model gives to the same tokens when it draws them."""
    told = complete(client, max_tokens=6, logprobs=2)["choices"][0]
    drawn = model.generate(PROMPT, max_tokens=6, temperature=0, logprobs=0)
    ids = model.tokenize(PROMPT) + drawn.tokens
    whole = complete(client, prompt=ids, max_tokens=1, echo=True, logprobs=2, prompt_logprobs=2)
    choice, n = whole["choices"][0], len(ids) - 6
    known = choice["logprobs"]
    assert known["token_logprobs"][0] is None and len(known["tokens"]) == len(ids) + 1
    assert known["token_logprobs"][n:-1] == pytest.approx(told["logprobs"]["token_logprobs"])
    assert "".join(known["tokens"]) == choice["text"]
    begins = zip(known["tokens"], known["text_offset"], strict=True)
    assert all(choice["text"][offset:].startswith(token) for token, offset in begins)
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    assert all(str(token) in each for token, each in zip(ids[1:], others, strict=True))
    assert others[-1][str(ids[-1])]["rank"] == 1  # it was the likeliest


def test_an_answer_ends_at_one_of_the_tokens_that_end_it(
    client: httpx.Client, model: Model
) -> None:
    tokens = model.generate(PROMPT, max_tokens=8, temperature=0).tokens
    end = tokens[5]
    n = tokens.index(end)
    told = complete(client, max_tokens=8, stop_token_ids=[end])
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["choices"][0]["text"] == model.detokenize(tokens[:n])
    assert told["usage"]["completion_tokens"] == n + 1
    later = complete(client, max_tokens=8, stop_token_ids=[end], min_tokens=8)
    assert later["usage"]["completion_tokens"] == 8
    plain = complete(client, max_tokens=8, stop_token_ids=[end], min_tokens=8, draft_width=0)
    assert later["choices"][0]["text"] == plain["choices"][0]["text"]
