"""Several models in one server: by name, loaded when asked for, each with its own fate."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_coder
from api_clients import anthropic, of_anthropic, of_ollama, of_openai, ollama, openai
from dflash_local import Model
from dflash_local.server.models.source import ModelSource
from openai_api import CERTAIN, CHAT, COMPLETIONS, QUESTION, user
from server_process import EXACT, ServerProcess, serving, until

SHORT = {"prompt": "def f(x):", "max_tokens": 1, "temperature": 0}
UNKNOWN = "no-such-model"
NAMES = ["last", "coder", "plain:q8", "broken"]


@pytest.fixture(scope="module")
def models(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of models: one drafts, one does not, one is broken."""
    folder = tmp_path_factory.mktemp("models")
    target, drafter = pair
    for source, name in ((target, "coder.gguf"), (drafter, "coder-draft.gguf")):
        os.symlink(source, folder / name)
    (folder / "broken.gguf").write_bytes(target.read_bytes()[:100_000])
    (folder / "models.toml").write_text(
        """
        [coder]
        target = "coder.gguf"
        draft = "coder-draft.gguf"
        ["plain:q8"]
        target = "coder.gguf"
        ctx = 512
        parallel = 1
        [broken]
        target = "broken.gguf"
        """
    )
    return folder


@pytest.fixture(scope="module")
def several(models: Path, pair: tuple[Path, Path]) -> Iterator[ServerProcess]:
    """A server of these models, and of one more. Nothing is loaded until it is asked for."""
    last = f"last={pair[0]},{pair[1]}"
    arguments = (*EXACT[:-2], "--models", str(models / "models.toml"), "--model", last)
    with serving(*arguments, "--keep-alive", "-1") as running, running.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert states(client) == dict.fromkeys(NAMES, "unloaded")
        assert client.get("/slots").json() == []
        assert "serving last, coder, plain:q8, broken at" in running.wait_for("^serving").string
        assert not any(line.startswith("loading") for line in running.log)
        yield running


@pytest.fixture
def client(several: ServerProcess) -> Iterator[httpx.Client]:
    with several.client() as connected:
        yield connected


def states(client: httpx.Client) -> dict[str, str]:
    listed = client.get("/v1/models").json()["data"]
    return {entry["id"]: entry["status"]["value"] for entry in listed}


def n_loads(server: ServerProcess, name: str) -> int:
    return sum(line == f"loading {name}" for line in server.log)


# By name.


def test_the_model_that_is_named_answers(several: ServerProcess, model: Model) -> None:
    api = of_openai(several)
    assert [listed.id for listed in api.models.list()] == NAMES
    own = model.chat(user(QUESTION), max_tokens=CERTAIN, temperature=0).text
    asked: Any = {"messages": user(QUESTION), "max_tokens": CERTAIN, "temperature": 0}
    for name, drafts in (("coder", True), ("plain:q8", False)):
        extra = {"draft_width": 8} if drafts else {}
        told = api.chat.completions.create(model=name, **asked, extra_body=extra)
        assert (told.model, told.choices[0].message.content) == (name, own)
        timings: Any = told.model_extra
        assert ("draft_n" in timings["timings"]) == drafts
        assert api.models.retrieve(name).to_dict()["status"] == {"value": "loaded"}
    *pieces, last = api.chat.completions.create(model="coder", **asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == own
    assert last.model == "coder"


def test_a_request_that_names_none_gets_the_first(client: httpx.Client) -> None:
    for body in (SHORT, {**SHORT, "model": ""}):
        assert client.post(COMPLETIONS, json=body).json()["model"] == "last"
    assert (
        client.post("/completion", json={"prompt": "a", "n_predict": 1}).json()["model"] == "last"
    )
    gap = {"input_prefix": "def f(", "input_suffix": "", "n_predict": 1}
    assert client.post("/infill", json=gap).json()["model"] == "last"


def test_how_a_model_samples_is_known_before_it_is_loaded() -> None:
    assert ModelSource("tiny", tiny_coder.pair()[0]).defaults.for_chats["temperature"] == 0
    for word in ("copies", "mtp"):
        source = ModelSource("tiny", tiny_coder.pair()[0], Path(word))
        assert source.defaults.for_chats["temperature"] == 0


def test_looking_at_a_model_does_not_load_it(client: httpx.Client) -> None:
    """A page of any website can let its visitors send a GET."""

    def state() -> str:
        return str(client.get("/v1/models/coder").json()["status"]["value"])

    client.post("/api/generate", json={"model": "coder", "keep_alive": 0}).raise_for_status()
    until(lambda: state() == "unloaded")
    props = client.get("/props?model=coder").json()
    assert (props["model_alias"], props["is_sleeping"]) == ("coder", True)
    assert client.get("/slots?model=coder").json() == []
    for path in ("/slots?model=coder", "/v1/models", "/metrics", "/api/tags", "/api/ps", "/health"):
        assert client.get(path).status_code == 200
    assert state() == "unloaded"


def test_llama_servers_routes_take_a_name(client: httpx.Client) -> None:
    client.post("/tokenize", json={"model": "plain:q8", "content": "def"}).raise_for_status()
    assert client.get("/props?model=plain:q8").json()["default_generation_settings"]["n_ctx"] == 512
    assert [slot["id"] for slot in client.get("/slots?model=plain:q8").json()] == [0]
    named = {"model": "plain:q8"}
    tokens = client.post("/tokenize", json={**named, "content": "def"}).json()["tokens"]
    told = client.post("/detokenize", json={**named, "tokens": tokens}).json()
    assert told == {"content": "def"}
    prompt = client.post("/apply-template", json={**named, "messages": user("Hi")}).json()["prompt"]
    assert "Hi" in prompt
    for path in ("/completion", "/infill"):
        gap = {"input_prefix": "a", "input_suffix": ""}
        answer = client.post(path, json={**named, **gap, "prompt": "a", "n_predict": 1}).json()
        assert answer["model"] == "plain:q8"
        assert answer["generation_settings"]["n_ctx"] == 512


def test_metrics_tell_the_models_apart(client: httpx.Client) -> None:
    for name in ("coder", "plain:q8"):
        client.post(COMPLETIONS, json={**SHORT, "model": name}).raise_for_status()
    lines = client.get("/metrics").text.splitlines()
    for name in ("coder", "plain:q8"):
        counted = f'llamacpp:tokens_predicted_total{{model_name="{name}"}} '
        assert sum(line.startswith(counted) for line in lines) == 1
        finished = f'vllm:request_success_total{{finished_reason="length",model_name="{name}"}} '
        assert sum(line.startswith(finished) for line in lines) == 1
    assert not any('model_name="broken"' in line and "llamacpp" in line for line in lines)


# Names of no model.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": user("Hi")}),
        (CHAT, {"messages": user("Hi"), "stream": True}),
        (COMPLETIONS, SHORT),
        ("/v1/responses", {"input": "Hi"}),
        ("/completion", {"prompt": "Hi"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/tokenize", {"content": "Hi"}),
        ("/apply-template", {"messages": user("Hi")}),
    ],
)
def test_openais_clients_are_told_of_no_such_model(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json={**body, "model": UNKNOWN})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert UNKNOWN in error["message"] and "'coder'" in error["message"]


def test_every_client_is_told_of_no_such_model_in_its_words(
    several: ServerProcess, client: httpx.Client
) -> None:
    with pytest.raises(openai.NotFoundError, match="not found"):
        of_openai(several).completions.create(model=UNKNOWN, prompt="a")
    with pytest.raises(anthropic.NotFoundError, match="not found") as missing:
        asked: Any = {"max_tokens": 1, "messages": user("Hi")}
        of_anthropic(several).messages.create(model=UNKNOWN, **asked)
    told: Any = missing.value.body
    assert told["error"]["type"] == "not_found_error"
    api = of_ollama(several)
    for call in (
        lambda: api.chat(UNKNOWN, messages=user("Hi")),
        lambda: api.generate(UNKNOWN, keep_alive=0),
        lambda: api.show(UNKNOWN),
    ):
        with pytest.raises(ollama.ResponseError, match="not found") as error:
            call()
        assert error.value.status_code == 404
    for path in ("/props", "/slots"):
        assert client.get(path, params={"model": UNKNOWN}).status_code == 404
    assert client.get(f"/v1/models/{UNKNOWN}").status_code == 404


# A model that cannot be loaded.


def test_a_broken_model_tells_its_own_requests_and_hurts_no_other(
    several: ServerProcess, client: httpx.Client, models: Path
) -> None:
    api = of_openai(several)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match=r"broken\.gguf") as failure:
            api.completions.create(model="broken", prompt="a", stream=stream)
        assert failure.value.code == "model_load_failed"
        assert "\n" not in failure.value.message
        assert str(models) not in failure.value.message
    with pytest.raises(anthropic.InternalServerError, match=r"broken\.gguf"):
        body: Any = {"max_tokens": 1, "messages": user("Hi")}
        of_anthropic(several).messages.create(model="broken", **body)
    asked = of_ollama(several)
    for call in (lambda: asked.generate("broken", "Hi"), lambda: asked.show("broken:latest")):
        with pytest.raises(ollama.ResponseError, match=r"broken\.gguf"):
            call()
    entry = client.get("/v1/models/broken").json()
    assert entry["status"] == {"value": "unloaded", "failed": True}
    assert client.post(COMPLETIONS, json={**SHORT, "model": "coder"}).status_code == 200
    assert "Traceback" not in "\n".join(several.log)


@pytest.mark.slow
def test_a_model_that_was_mended_is_loaded_at_the_next_request(
    models: Path, pair: tuple[Path, Path]
) -> None:
    file = models / "mended.gguf"
    file.write_bytes(b"GGUF")
    with serving("--model", f"mended={file}", *EXACT[:-2]) as server, server.client() as client:
        # The only model: any name is its, and it is loaded when it is first asked for.
        assert client.post(COMPLETIONS, json={**SHORT, "model": "gpt-4"}).status_code == 500
        shutil.copy(pair[0], file)
        answer = client.post(COMPLETIONS, json={**SHORT, "model": "gpt-4"})
        assert (answer.status_code, answer.json()["model"]) == (200, "mended")
        assert client.get("/v1/models").json()["data"][0]["status"] == {"value": "loaded"}


# As Ollama's clients see them.


def test_ollamas_client_lists_loads_and_unloads(several: ServerProcess) -> None:
    api = of_ollama(several)
    sizes = {listed.model: listed.size for listed in api.list().models}
    assert list(sizes) == ["last:latest", "coder:latest", "plain:q8", "broken:latest"]
    assert sizes["broken:latest"] == 0 < (sizes["coder:latest"] or 0)

    def running() -> dict[str | None, Any]:
        return {listed.model: listed for listed in api.ps().models}

    assert api.generate("plain:q8", keep_alive=0).done_reason == "unload"
    until(lambda: "plain:q8" not in running())
    assert api.show("plain:q8").capabilities == ["completion", "insert"]
    assert "plain:q8" not in running()
    assert api.chat("plain:q8", keep_alive="1h").done_reason == "load"
    left = running()["plain:q8"].expires_at.timestamp() - time.time()
    assert 3500 < left <= 3600
    assert running()["plain:q8"].context_length == 512
    api.generate("plain:q8", "Hi", options={"num_predict": 1}, keep_alive=-1)
    assert running()["plain:q8"].expires_at.year == 9999
    api.chat("plain:q8", messages=user("Hi"), options={"num_predict": 1}, keep_alive=0)
    until(lambda: "plain:q8" not in running())
    api.generate("coder:latest", "Hi", options={"num_predict": 1}, keep_alive="200ms")
    until(lambda: "coder:latest" not in running())
    with pytest.raises(ollama.ResponseError, match="is not a time") as bad:
        api.generate("coder", "Hi", keep_alive="soon")
    assert bad.value.status_code == 400


def test_anthropics_client_lists_them(several: ServerProcess) -> None:
    api = of_anthropic(several)
    assert [listed.id for listed in api.models.list()] == NAMES
    counted = api.messages.count_tokens(model="coder", messages=[{"role": "user", "content": "Hi"}])
    assert counted.input_tokens > 0
    known = api.models.retrieve("coder")
    assert (known.type, known.created_at.year > 2025) == ("model", True)
    assert known.to_dict()["max_input_tokens"] > 512


# Coming and going.


def test_many_first_requests_load_a_model_once(
    several: ServerProcess, client: httpx.Client
) -> None:
    of_ollama(several).generate("last", keep_alive=0)
    until(lambda: states(client)["last"] == "unloaded")
    before = n_loads(several, "last")
    with ThreadPoolExecutor(8) as pool:
        bodies = [{**SHORT, "model": "last"}] * 8
        answers = list(pool.map(lambda body: client.post(COMPLETIONS, json=body), bodies))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert n_loads(several, "last") == before + 1


@pytest.mark.slow
def test_an_idle_model_is_unloaded_and_comes_back(pair: tuple[Path, Path]) -> None:
    arguments = ("--target", str(pair[0]), *EXACT[:-2], "--keep-alive", "300ms")
    with serving(*arguments) as server, server.client() as client:
        name = pair[0].stem
        for n in range(2):  # nobody has used it yet, then somebody has
            server.wait_for(f"^unloading {name}, idle for 0.3 s")
            until(lambda: states(client)[name] == "unloaded")
            assert client.get("/health").status_code == 200
            assert n_loads(server, name) == n
            assert client.post(COMPLETIONS, json=SHORT).status_code == 200
        assert n_loads(server, name) == 2


@pytest.mark.slow
def test_who_only_looks_keeps_no_model_awake(pair: tuple[Path, Path]) -> None:
    arguments = ("--target", str(pair[0]), *EXACT[:-2], "--keep-alive", "500ms")
    with serving(*arguments) as server, server.client() as client:

        def counted() -> tuple[float, float]:
            lines = client.get("/metrics").text.splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
            name = next(key for key in values if key.startswith("vllm:generation_tokens_total"))
            return float(values["llamacpp:prompt_tokens_total"]), float(values[name])

        body = {"prompt": "def f(x):", "max_tokens": 3, "temperature": 0, "cache_prompt": False}
        client.post(COMPLETIONS, json=body).raise_for_status()
        once = counted()
        assert once[1] == 3
        server.wait_for(f"POST {COMPLETIONS}")  # the log is read in another thread
        n_lines = len(server.log)

        def asleep() -> bool:
            for path in ("/health", "/slots", "/v1/models", "/metrics"):
                client.get(path).raise_for_status()
            return bool(client.get("/props").json()["is_sleeping"])

        until(asleep)
        assert not any(line.startswith("loading") for line in server.log[n_lines:])
        assert counted() == once
        client.post(COMPLETIONS, json=body).raise_for_status()
        assert counted() == (2 * once[0], 6)
