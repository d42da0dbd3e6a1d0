"""Facts for Ollama's clients about models that are not loaded."""

from pathlib import Path

import httpx
from starlette.testclient import TestClient

from dflash_local.server.app import create_app
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import ModelSource
from gguf_files import UINT32, changed, small


def test_weights_that_are_not_quantised_have_ollama_s_name(tmp_path: Path) -> None:
    keys = {"general.file_type": (0, UINT32, None)}
    path = changed(small(tmp_path / "small.gguf"), tmp_path / "f32.gguf", keys=keys)
    app = create_app(ModelPool([ModelSource("m", path)]), ServerSettings())
    (model,) = TestClient(app, "http://localhost").get("/api/tags").json()["models"]
    assert model["details"]["quantization_level"] == "F32"


def test_a_model_that_is_served_is_shown_as_ollama_shows_it(client: httpx.Client) -> None:
    name = {"model": "tiny-coder-q8_0:latest"}
    shown = client.post("/api/show", json=name).json()
    lines = dict(line.split() for line in shown["parameters"].split("\n"))
    assert lines["num_ctx"] == "4096"
    assert float(lines["temperature"]) == 0  # the tiny pair is greedy
    assert shown["license"] == ""


def test_head_asks_whether_a_server_is_there(client: httpx.Client) -> None:
    for path in ("/", "/api/tags", "/api/version", "/ping"):
        answer = client.head(path)
        assert answer.status_code == 200 and not answer.content


def test_what_vllm_s_clients_ask_of_a_server(client: httpx.Client) -> None:
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.get("/version").json()["version"]
    assert client.get("/load").json() == {"server_load": 0}
