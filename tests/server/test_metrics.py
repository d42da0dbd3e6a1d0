"""`/metrics` as Prometheus reads it, and `/slots`: all requests are counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server_process import EXACT, ServerProcess, serving

Samples = dict[tuple[str, str | None], float]
N_TOKENS = 24
PROMPT = "def fib(n):\n    # " + "This one is written with a loop, as that is faster. " * 4


def scrape(client: httpx.Client) -> Samples:
    """Values by name and place in the draft, the one label that matters here."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert int(answer.headers["process-start-time-unix"]) > 0
    return {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


@dataclass(frozen=True)
class Counted:
    """The metrics of a new server, its answers to two equal requests, and its metrics then."""

    server: ServerProcess
    before: Samples
    slots_before: list[dict[str, Any]]
    usages: list[dict[str, Any]]
    after: Samples
    slots_after: list[dict[str, Any]]


@pytest.fixture(scope="module")
def counted(cache_folder: Path) -> Iterator[Counted]:
    body = {"prompt": PROMPT, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
    with serving(*EXACT, "--parallel", "2") as running, running.client() as client:
        before, slots_before = scrape(client), client.get("/slots").json()
        usages = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
        after, slots_after = scrape(client), client.get("/slots").json()
        yield Counted(running, before, slots_before, usages, after, slots_after)


@pytest.fixture
def fresh(counted: Counted) -> ServerProcess:
    """That server, which no test of another file asks."""
    return counted.server


def test_nothing_is_counted_yet(counted: Counted) -> None:
    before, slots = counted.before, counted.slots_before
    for name in (
        *("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
        *("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        *("vllm:num_requests_running", "vllm:num_requests_waiting"),
        *("vllm:prefix_cache_hits_total", "vllm:spec_decode_num_draft_tokens_total"),
        "vllm:time_to_first_token_seconds_count",
    ):
        assert before[name, None] == 0, name
    assert before["dflash_local:slots", None] == 2
    assert [slot["id"] for slot in slots] == [0, 1]
    assert not any(slot["is_processing"] or slot["n_cached_tokens"] for slot in slots)


def test_answers_are_counted(counted: Counted) -> None:
    usages, after, slots = counted.usages, counted.after, counted.slots_after
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached == usages[1]["prompt_tokens"] - 1  # the second request is the first again
    assert after["llamacpp:prompt_tokens_total", None] == prompt - cached
    assert after["llamacpp:tokens_predicted_total", None] == 2 * N_TOKENS
    assert after["llamacpp:prompt_seconds_total", None] > 0
    assert after["llamacpp:tokens_predicted_seconds_total", None] > 0
    assert after["llamacpp:prompt_tokens_cached_total", None] == cached
    assert after["llamacpp:predicted_tokens_seconds", None] > 0
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        own = after[f"llamacpp:spec_decode_num_{name}_total", None]
        assert own == after[f"vllm:spec_decode_num_{name}_total", None] > 0
    assert after["vllm:prompt_tokens_total", None] == prompt
    assert after["vllm:generation_tokens_total", None] == 2 * N_TOKENS
    assert after["vllm:prefix_cache_queries_total", None] == prompt
    assert after["vllm:prefix_cache_hits_total", None] == cached
    assert after["vllm:request_success_total", None] == 2
    assert after["vllm:time_to_first_token_seconds_count", None] == 2
    assert after["vllm:e2e_request_latency_seconds_count", None] == 2
    first = after["vllm:time_to_first_token_seconds_sum", None]
    assert 0 < first <= after["vllm:e2e_request_latency_seconds_sum", None]
    assert after["vllm:num_requests_running", None] == 0
    assert after["dflash_local:requests_total", None] == 2
    assert 0 < after["llamacpp:kv_cache_usage_ratio", None] < 1
    assert 0 < after["llamacpp:n_decode_total", None] <= prompt + 2 * N_TOKENS
    assert after["llamacpp:n_busy_slots_per_decode", None] == 1  # one request after the other
    longest = usages[0]["prompt_tokens"] + N_TOKENS
    assert longest - 1 <= after["llamacpp:n_tokens_max", None] <= longest
    assert sum(slot["n_cached_tokens"] for slot in slots) >= N_TOKENS


def test_drafts_are_counted_by_their_place(counted: Counted) -> None:
    after = counted.after

    def places(name: str) -> list[float]:
        found = {place: value for (n, place), value in after.items() if n == name}
        return [found[str(i)] for i in range(len(found))]

    accepted = places("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    drafted = places("dflash_local:drafted_tokens_per_pos_total")
    assert sum(accepted) == after["vllm:spec_decode_num_accepted_tokens_total", None] > 0
    assert sum(drafted) == after["vllm:spec_decode_num_draft_tokens_total", None]
    assert drafted[0] == after["vllm:spec_decode_num_drafts_total", None]
    assert accepted == sorted(accepted, reverse=True)
    assert all(a <= b for a, b in zip(accepted, drafted, strict=True))
    copied = after["dflash_local:copied_tokens_total", None]
    assert after["dflash_local:copied_accepted_tokens_total", None] <= copied <= sum(drafted)


def test_what_is_going_on_is_seen(fresh: ServerProcess) -> None:
    body = {"prompt": "def f(x):", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with fresh.client() as client, fresh.client() as other:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            during = scrape(other)
            slots = other.get("/slots").json()
        assert during["llamacpp:requests_processing", None] == 1
        assert during["vllm:num_requests_running", None] == 1
        assert sum(slot["is_processing"] for slot in slots) == 1


def test_refused_requests_are_counted(fresh: ServerProcess) -> None:
    with fresh.client() as client:
        client.get("/no-such-route")
        text = client.get("/metrics").text
    assert 'dflash_local:http_responses_total{status="404"} 1.0' in text
