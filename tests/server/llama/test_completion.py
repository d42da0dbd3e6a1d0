"""`/completion` and its like, as llama-server's clients use them, against a real server."""

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dflash_local import Model
from dflash_local.server.llama.completion import LineLimits

PATH = "/completion"
PROMPT = "def fibonacci(n):\n"
FEW = 8
"""Tokens."""


def complete(client: httpx.Client, **body: Any) -> Any:
    answer = client.post(PATH, json={"prompt": PROMPT, "n_predict": FEW, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.2, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.7, "seed": 5, "repeat_penalty": 1.3, "repeat_last_n": 32},
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {
            **{"temperature": 0.9, "seed": 3, "dry_multiplier": 0.8, "dry_allowed_length": 1},
            **{"top_n_sigma": 2.0, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05},
            **{"dynatemp_range": 0.5, "dry_sequence_breakers": ["(", "n"], "dry_base": 2.0},
        },
    ],
)
def test_an_answer_is_the_model_s_own(
    client: httpx.Client, model: Model, options: dict[str, Any]
) -> None:
    told = complete(client, n_predict=24, return_tokens=True, **options)
    own = model.generate(PROMPT, max_tokens=24, **options)
    assert told["tokens"] == own.tokens
    assert told["content"] == own.text
    assert told["tokens_predicted"] == len(own.tokens)
    assert told["tokens_evaluated"] == len(model.tokenize(PROMPT))


def test_an_answer_says_what_it_cost(client: httpx.Client) -> None:
    told = complete(client, temperature=0, n_predict=48)
    timings = told["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == told["tokens_evaluated"]
    assert timings["cache_n"] == told["tokens_cached"]
    assert timings["predicted_n"] == told["tokens_predicted"] == 48
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    n_rounds = timings["predicted_n"] - 1 - timings["draft_n_accepted"]
    assert timings["tokens_per_round"] == pytest.approx(47 / n_rounds, abs=1e-3)
    # The first token comes with the prompt's last row, so 47 took the time.
    assert timings["predicted_per_second"] == pytest.approx(47e3 / timings["predicted_ms"])
    assert complete(client, temperature=0, n_predict=1)["timings"]["predicted_per_second"] == 0
    assert told["prompt"] == PROMPT
    assert {"adaptive_target", "adaptive_decay"} <= told["generation_settings"].keys()
    assert told["stop"] is True


def test_a_stream_is_the_whole_answer_in_pieces(client: httpx.Client) -> None:
    whole = complete(client, temperature=0, return_tokens=True)
    with client.stream(
        "POST", PATH, json={"prompt": PROMPT, "n_predict": FEW, "temperature": 0, "stream": True}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = events(answer.read().decode())
    *parts, last = told
    assert len(parts) > 1
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert last["stop"] is True
    assert last["content"] == ""
    same = ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "truncated")
    assert {key: last[key] for key in same} == {key: whole[key] for key in same}


def test_a_stream_tells_how_much_of_the_prompt_is_read_where_asked(client: httpx.Client) -> None:
    asked = {"prompt": "x = 1\n" * 60, "n_predict": FEW, "stream": True, "temperature": 0}
    body = {**asked, "return_progress": True, "timings_per_token": True, "cache_prompt": False}
    told = events(client.post(PATH, json=body).text)
    read = [event for event in told if "prompt_progress" in event]
    assert read == told[: len(read)], "they come before the answer"
    progress = [event["prompt_progress"] for event in read]
    assert {each["total"] for each in progress} == {told[-1]["tokens_evaluated"]}
    processed = [each["processed"] for each in progress]
    assert processed == sorted(set(processed))
    assert (progress[0]["cache"], processed[0], processed[-1]) == (0, 0, progress[0]["total"])
    assert read[0]["timings"]["prompt_ms"] == read[0]["timings"]["prompt_n"] == 0
    assert read[-1]["timings"]["prompt_ms"] > 0

    body = {**asked, "return_progress": True}
    again = [each for each in events(client.post(PATH, json=body).text) if not each["stop"]]
    first = again[0]["prompt_progress"]
    assert first["cache"] == first["processed"] > 0
    whole = complete(client, **{**body, "stream": False})
    assert whole["content"] == "".join(each["content"] for each in again)
    assert all("prompt_progress" not in each for each in events(client.post(PATH, json=asked).text))


def test_a_stream_tells_the_time_where_asked(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "n_predict": FEW, "temperature": 0, "stream": True}
    told = events(client.post(PATH, json={**body, "timings_per_token": True}).text)
    assert [event["timings"]["predicted_n"] for event in told] == [
        event["tokens_predicted"] for event in told
    ]
    *parts, last = events(client.post(PATH, json=body).text)
    assert "timings" in last and not any("timings" in part for part in parts)


def test_what_a_prompt_may_be(client: httpx.Client, model: Model) -> None:
    ids = model.tokenize(PROMPT)
    whole = complete(client, temperature=0)["content"]
    assert complete(client, prompt=ids, temperature=0)["content"] == whole
    mixed = [PROMPT[:3], *model.tokenize(PROMPT[3:])]
    assert complete(client, prompt=mixed, temperature=0)["content"] == whole
    given = {"prompt_string": PROMPT, "multimodal_data": []}
    assert complete(client, prompt=given, temperature=0)["content"] == whole
    both = complete(client, prompt=[given, PROMPT], temperature=0)
    assert [answer["content"] for answer in both] == [whole, whole]


def test_several_prompts_are_answered_in_a_list(client: httpx.Client) -> None:
    prompts = [PROMPT, "import os\n", "class A:\n"]
    options = {"temperature": 0, "n_predict": 4}
    together = complete(client, prompt=prompts, **options)
    alone = [complete(client, prompt=prompt, **options)["content"] for prompt in prompts]
    assert [answer["index"] for answer in together] == [0, 1, 2]
    assert [answer["content"] for answer in together] == alone


def test_several_answers_count_on_from_the_seed(client: httpx.Client) -> None:
    together = complete(client, n_cmpl=3, seed=11, n_predict=4)
    alone = [complete(client, seed=seed, n_predict=4)["content"] for seed in (11, 12, 13)]
    assert [answer["content"] for answer in together] == alone
    assert [answer["generation_settings"]["seed"] for answer in together] == [11, 12, 13]


def test_only_the_fields_asked_for_are_answered(client: httpx.Client) -> None:
    fields = ["content", "timings/predicted_n", "generation_settings/n_predict", "no/such"]
    told = complete(client, response_fields=fields)
    assert list(told) == fields[:3]
    assert told["timings/predicted_n"] == FEW
    assert told["generation_settings/n_predict"] == FEW
    assert complete(client, response_fields=[""]) == {}


def test_no_tokens_reads_the_prompt_into_the_cache(client: httpx.Client) -> None:
    prompt = "".join(f"registered_{i} = register({i * i})\n" for i in range(20))
    told = complete(client, prompt=prompt, n_predict=0)
    assert (told["content"], told["tokens_predicted"]) == ("", 0)
    again = complete(client, prompt=prompt, n_predict=1)
    assert again["tokens_cached"] == again["tokens_evaluated"] - 1
    assert complete(client, prompt=prompt, n_predict=1, cache_prompt=False)["tokens_cached"] == 0


def test_an_answer_says_what_ended_it(client: httpx.Client, model: Model) -> None:
    text = model.generate(PROMPT, max_tokens=FEW).text
    stop = text[len(text) // 2 :][:3]
    told = complete(client, temperature=0, stop=["nowhere to be found", stop])
    assert (told["stop_type"], told["stopping_word"]) == ("word", stop)
    assert told["content"] == text[: text.index(stop)]
    told = complete(client, temperature=0, stop=[stop], include_stop_str_in_output=True)
    assert (told["stop_type"], told["stopping_word"]) == ("word", stop)
    assert told["content"] == text[: text.index(stop)] + stop
    both = [stop[1:], stop]  # they end together
    told = complete(client, temperature=0, stop=both, include_stop_str_in_output=True)
    ends = [text for text in both if told["content"].endswith(text)]
    assert told["stopping_word"] == max(ends, key=len)
    assert complete(client, temperature=0)["stop_type"] == "limit"
    end = model.tokenize("<|im_end|>")
    bias = [[end[0], 100.0]]
    told = complete(client, temperature=0, logit_bias=bias)
    assert (told["stop_type"], told["stopping_word"], told["content"]) == ("eos", "", "")
    told = complete(client, temperature=0, logit_bias=bias, ignore_eos=True, n_predict=4)
    assert (told["stop_type"], told["tokens_predicted"]) == ("limit", 4)


def test_a_forbidden_token_is_not_taken(client: httpx.Client, model: Model) -> None:
    first = complete(client, temperature=0, n_predict=1, return_tokens=True)["tokens"][0]
    for bias in ([[first, False]], {str(first): False}, [[first, -100]]):
        told = complete(client, temperature=0, n_predict=1, return_tokens=True, logit_bias=bias)
        own = model.generate(PROMPT, max_tokens=1, logit_bias={first: float("-inf")})
        assert told["tokens"] == own.tokens != [first]


def test_a_text_s_tokens_are_biased(client: httpx.Client, model: Model) -> None:
    tokens = set(model.tokenize("zebra"))
    for bias in ({"zebra": 100}, [["zebra", 100]]):
        told = complete(client, n_predict=4, return_tokens=True, logit_bias=bias, temperature=2.5)
        assert set(told["tokens"]) <= tokens


def test_a_grammar_binds_the_answer(client: httpx.Client) -> None:
    assert complete(client, grammar='root ::= "yes" | "no"')["content"] in ("yes", "no")
    told = complete(client, json_schema={"const": {"n": 7}}, n_predict=64, seed=1)
    assert told["stop_type"] == "eos"
    assert json.loads(told["content"]) == {"n": 7}


def test_probabilities_are_the_model_s(client: httpx.Client, model: Model) -> None:
    told = complete(client, temperature=0, n_probs=3, n_predict=6)["completion_probabilities"]
    own = model.generate(PROMPT, max_tokens=6, logprobs=3)
    assert [entry["id"] for entry in told] == own.tokens
    for entry, expected in zip(told, own.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(expected.logprob)
        assert [top["id"] for top in entry["top_logprobs"]] == [id for id, _ in expected.top]
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_chances_after_sampling_are_those_by_which_tokens_come(client: httpx.Client) -> None:
    """Of many first tokens, each comes about as often as it is said to."""
    asked = {"n_predict": 1, "post_sampling_probs": True, "temperature": 1.3, "top_k": 5}
    counts: Counter[int] = Counter()
    for seed in range(0, 112, 16):  # the answers count on from it
        for answer in complete(client, n_probs=5, seed=seed, n_cmpl=16, **asked):
            (entry,) = answer["completion_probabilities"]
            counts[entry["id"]] += 1
    top = {each["id"]: each["prob"] for each in entry["top_probs"]}
    assert sum(top.values()) == pytest.approx(1)
    assert list(top.values()) == sorted(top.values(), reverse=True)
    assert entry["prob"] == top[entry["id"]]
    assert "logprob" not in entry
    for token, chance in top.items():
        spread = 4 * math.sqrt(chance * (1 - chance) / 112)
        assert counts[token] / 112 == pytest.approx(chance, abs=spread + 0.01)
    assert counts.keys() <= top.keys()
    (greedy,) = complete(client, **{**asked, "temperature": 0}, n_probs=2)[
        "completion_probabilities"
    ]
    assert greedy["prob"] == 1
    assert [each["prob"] for each in greedy["top_probs"]] == [1]


def test_null_is_a_field_left_out(client: httpx.Client) -> None:
    nulls = dict.fromkeys(("stop", "seed", "mirostat", "grammar", "min_p", "logit_bias", "n_probs"))
    plain = complete(client, temperature=0)["content"]
    assert complete(client, temperature=0, **nulls)["content"] == plain


def cut(pieces: list[str], *, n_indent: int = 0, limit_s: float = 0, times: Iterator[float]) -> str:
    limits = LineLimits(n_indent, limit_s, lambda: next(times))
    shown = []
    for piece in pieces:
        shown.append(limits.take(piece))
        if limits.ended:
            return "".join(shown)
    return "".join(shown) + limits.rest()


def still() -> Iterator[float]:
    while True:
        yield 0.0


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("n_indent", "text", "shown"),
    [
        (0, "a\nb\n", "a\nb\n"),
        (4, "x = 1\n    y = 2\nz", "x = 1\n    y = 2\n"),
        (4, "x = 1\n\t\t\t\ty = 2\n  z", "x = 1\n\t\t\t\ty = 2\n"),
        (2, "deep\n        deeper\n  back", "deep\n        deeper\n  back"),
        (1, "a block\n\nwhat follows", "a block\n"),
        (4, "cut off in\n  ", "cut off in\n  "),
        (4, "", ""),
    ],
)
def test_an_answer_ends_before_a_line_that_leaves_the_block(
    n_indent: int, text: str, shown: str
) -> None:
    assert cut([text], n_indent=n_indent, times=still()) == shown
    rng = random.Random(n_indent)
    for _ in range(50 if len(text) > 1 else 0):
        assert cut(pieces(text, rng), n_indent=n_indent, times=still()) == shown


def test_indentation_is_shown_only_once_its_line_goes_on() -> None:
    limits = LineLimits(4, 0)
    assert limits.take("a\n   ") == "a\n"
    assert limits.take(" ") == ""
    assert limits.take("b") == "    b"


def test_a_late_answer_ends_with_its_line() -> None:
    times = iter([0.0, 0.0, 0.5, 1.5, 1.6])
    texts = ["one\n", "two\nth", "ree", "\nfour\nfive"]
    assert cut(texts, limit_s=1, times=times) == "one\ntwo\nthree\n"
