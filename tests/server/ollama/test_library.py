"""Models that are pulled and deleted while a server runs, by Ollama's own client."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

import library_hub
import tiny_coder
from api_clients import of_ollama, ollama
from dflash_local.server.app import create_app
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import ModelSource
from library_hub import NAME
from server_process import EXACT, ServerProcess, serving

ASKED = {"messages": [{"role": "user", "content": "Write fib."}], "options": {"num_predict": 4}}


@pytest.mark.slow
def test_a_model_is_pulled_answers_and_is_deleted(tmp_path: Path, server: ServerProcess) -> None:
    with (
        library_hub.running() as hub,
        serving(*EXACT, environment=library_hub.environment(hub, tmp_path)) as running,
    ):
        client = of_ollama(running)
        steps = list(client.pull(NAME, stream=True))
        assert steps[-1].status == "success"
        sizes = [(step.completed, step.total) for step in steps if step.total]
        assert all(0 <= done <= size for done, size in sizes)
        assert any(done == size for done, size in sizes)
        assert [each.model for each in client.list().models] == [
            "tiny-coder-q8_0:latest",
            f"{NAME}:latest",
        ]
        assert client.chat(f"{NAME}:latest", **ASKED).message.content
        assert client.pull(NAME).status == "success"  # nothing is left to do
        asked = len(hub.requests)
        with pytest.raises(ollama.ResponseError, match="model 'gpt-4' not found"):
            client.chat("gpt-4", **ASKED)
        client.delete(NAME)
        assert [each.model for each in client.list().models] == ["tiny-coder-q8_0:latest"]
        assert not list((tmp_path / "hf").rglob("*.gguf"))
        assert len(hub.requests) == asked
        with pytest.raises(ollama.ResponseError, match=f"nothing of {NAME} is here"):
            client.delete(NAME)


@pytest.mark.slow
def test_what_fits_the_first_model_is_not_for_those_that_are_pulled(tmp_path: Path) -> None:
    with (
        library_hub.running() as hub,
        serving(
            "--pooling", "mean", *EXACT, environment=library_hub.environment(hub, tmp_path)
        ) as running,
    ):
        client = of_ollama(running)
        client.pull(NAME)
        assert client.chat(NAME, **ASKED).message.content


@pytest.mark.parametrize("name", ["/etc/hostname", "../secret.gguf", "", "no such model"])
def test_only_models_by_their_names_are_pulled(client: httpx.Client, name: str) -> None:
    """A client cannot try which files there are."""
    answer = client.post("/api/pull", json={"model": name})
    assert answer.status_code == 400 and "name of a model" in answer.json()["error"]


def test_what_the_server_was_started_with_stays(client: httpx.Client) -> None:
    answer = client.request("DELETE", "/api/delete", json={"model": "tiny-coder-q8_0"})
    assert answer.status_code == 409 and "was started with" in answer.json()["error"]
    assert tiny_coder.pair()[0].is_file()


def test_a_server_for_other_machines_changes_no_models() -> None:
    pool = ModelPool([ModelSource("m", tiny_coder.pair()[0])], further=lambda *_: 1 / 0)  # type: ignore[arg-type,return-value]
    app = create_app(pool, ServerSettings(host="0.0.0.0", api_keys=("k",)))
    client = TestClient(app, "http://127.0.0.1", headers={"Authorization": "Bearer k"})
    pulled = client.post("/api/pull", json={"model": "qwen3-8b"})
    deleted = client.request("DELETE", "/api/delete", json={"model": "qwen3-8b"})
    listed = client.get("/library")
    assert pulled.status_code == deleted.status_code == 403
    assert "dflash-local pull" in pulled.json()["error"]
    assert listed.json()["may_change"] is False
    assert {"name", "n_bytes", "fits", "here"} <= listed.json()["models"][0].keys()
