"""Adapters: their scales, for all requests and for each."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_coder
from adapters import write_lora
from dflash_local import load
from server_process import EXACT, serving

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add_all(numbers):\n"
MESSAGES = [{"role": "user", "content": "Add all numbers."}]


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "style.gguf"
    names = [f"blk.{i}.ffn_down.weight" for i in range(8)]
    return write_lora(path, tiny_coder.pair()[0], names=names, gain=0.15)


@pytest.fixture(scope="module")
def adapted(lora: Path, cache_folder: Path) -> Iterator[httpx.Client]:
    with serving("--lora", f"{lora}:0.5", *EXACT) as server, server.client() as client:
        yield client


@cache
def plain(lora: Path, scale: float) -> tuple[str, str]:
    """The model's answers to the prompt and to the messages."""
    options = {"n_gpu_layers": 0, "kv_type": "q8_0", "n_threads": 1, "quiet": True}
    with load(*tiny_coder.pair(), lora=[(lora, scale)], **options) as model:  # type: ignore[arg-type]
        ask: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "draft_width": 0}
        return model.generate(PROMPT, **ask).text, model.chat(MESSAGES, **ask).text


def completed(client: httpx.Client, **fields: Any) -> str:
    body = {"prompt": PROMPT, "n_predict": 24, "temperature": 0, **fields}
    content: str = client.post("/completion", json=body).raise_for_status().json()["content"]
    return content


def said(client: httpx.Client, **fields: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, **fields}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    content: str = answer["choices"][0]["message"]["content"]
    return content


def test_there_are_none(client: httpx.Client) -> None:
    assert client.get("/lora-adapters").json() == []
    body = {"prompt": "a", "lora": [{"id": 0, "scale": 1.0}]}
    answer = client.post("/completion", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "lora names adapter 0; loaded are none"


@pytest.mark.slow
def test_each_request_may_say(adapted: httpx.Client, lora: Path) -> None:
    """Also those that run at once."""
    expected = {scale: plain(lora, scale) for scale in (0.0, 0.5, 1.0)}
    assert len(set(expected.values())) == 3
    scales = (None, 0.0, 1.0, 0.5)

    def ask(scale: float | None) -> tuple[str, str]:
        fields = {} if scale is None else {"lora": [{"id": 0, "scale": scale}]}
        return completed(adapted, **fields), said(adapted, **fields)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, scales)) == [expected[0.5 if s is None else s] for s in scales]
    assert completed(adapted, lora=[]) == expected[0.0][0]


@pytest.mark.slow
def test_all_requests_are_told(adapted: httpx.Client, lora: Path) -> None:
    known = {"id": 0, "path": "style.gguf"}
    assert adapted.get("/lora-adapters").json() == [{**known, "scale": 0.5}]
    answer = adapted.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}])
    assert answer.json() == {"success": True}
    try:
        assert adapted.get("/lora-adapters").json() == [{**known, "scale": 1.0}]
        assert completed(adapted) == plain(lora, 1.0)[0]
    finally:
        adapted.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [{}, [{"id": 1, "scale": 1}], [{"id": -1, "scale": 1}], [{"id": 0}], [{"scale": "x"}]]
)
def test_bad_scales_are_refused(adapted: httpx.Client, body: Any) -> None:
    assert adapted.post("/lora-adapters", json=body).status_code == 400
    assert adapted.get("/lora-adapters").json()[0]["scale"] == 0.5
