"""An answer goes on where the context is full, if the server was started so."""

from typing import Any

import httpx
import pytest

from server_process import EXACT, serving

PROMPT = "def add(a, b):\n    return a + b\n"
BODY: dict[str, Any] = {"prompt": PROMPT, "n_predict": 150, "ignore_eos": True, "temperature": 0}


def completed(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = client.post("/completion", json={**BODY, **fields}).json()
    return answer


@pytest.mark.slow
def test_an_answer_goes_on(cache_folder: object) -> None:
    small = (*EXACT, "--ctx", "128", "--parallel", "1")
    with serving(*small) as server, server.client() as client:
        told = completed(client)
        assert told["truncated"] and told["tokens_predicted"] < 128
    options = ("--context-shift", "--keep", "-1")
    with serving(*small, *options) as server, server.client() as client:
        drafted, plain = completed(client), completed(client, draft_width=0, cache_prompt=False)
        assert drafted["truncated"] and drafted["tokens_predicted"] == 150
        assert drafted["timings"]["draft_n_accepted"] > 0
        assert drafted["content"] == plain["content"]
        assert completed(client, n_keep=4, n_discard=10)["tokens_predicted"] == 150
        assert not completed(client, n_predict=8)["truncated"]
