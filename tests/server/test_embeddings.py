"""Embeddings and reranking over HTTP, by models that are served beside one that writes text."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from api_clients import of_ollama, of_openai, ollama, openai
from dflash_local import Embedder, load_embedder
from embedding_models import N_EMBD, write_bert
from openai_api import CHAT, user
from raw_http import posted
from server_process import EXACT, ServerProcess, serving, until

TEXTS = ["hello world", "the cat sat on the mat"]
QUERY, DOCUMENTS = "what is machine learning", ["a cat", "machine learning is data", "paris"]
EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An embedding model and a reranker."""
    folder = tmp_path_factory.mktemp("embedders")
    ranker = write_bert(folder / "ranker.gguf", pooling=4, classifier=True)
    return write_bert(folder / "bert.gguf"), ranker


@pytest.fixture(scope="module")
def running(files: tuple[Path, Path]) -> Iterator[ServerProcess]:
    """The tiny pair, and both beside it."""
    both = [word for file in files for word in ("--embedding-model", str(file))]
    with serving(*EXACT, *both) as server:
        yield server


@pytest.fixture
def api(running: ServerProcess) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


@pytest.fixture(scope="module")
def embedders(files: tuple[Path, Path]) -> Iterator[list[Embedder]]:
    """Both in this process."""
    with ExitStack() as stack:
        options: dict[str, Any] = {"n_threads": 1, "n_gpu_layers": 0, "quiet": True}
        yield [stack.enter_context(load_embedder(file, **options)) for file in files]


@pytest.fixture(scope="module")
def bert(embedders: list[Embedder]) -> Embedder:
    return embedders[0]


def error(answer: httpx.Response, status: int = 400) -> str:
    """Its one line."""
    assert answer.status_code == status, answer.text
    told = answer.json()["error"]
    message: str = told if isinstance(told, str) else told["message"]
    assert "\n" not in message
    return message


def test_openai_s_client(running: ServerProcess, api: httpx.Client, bert: Embedder) -> None:
    """It asks for base64 by itself."""
    client = of_openai(running)
    found = client.embeddings.create(model="bert", input=TEXTS)
    expected = bert.embed(TEXTS)
    assert [each.index for each in found.data] == [0, 1] and found.model == "bert"
    assert np.allclose([each.embedding for each in found.data], expected, atol=1e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens == 4 + 8
    plain = client.embeddings.create(
        model="text-embedding-3-small", input=TEXTS[0], encoding_format="float", dimensions=8
    )
    cut = expected[0, :8] / np.linalg.norm(expected[0, :8])
    assert np.allclose(plain.data[0].embedding, cut, atol=1e-6)
    unsaid = api.post(EMBEDDINGS, json={"input": TEXTS, "encoding_format": None}).json()
    assert np.allclose([each["embedding"] for each in unsaid["data"]], expected, atol=1e-6)
    ids = client.embeddings.create(model="bert", input=[bert.tokens(text) for text in TEXTS])
    assert np.allclose([each.embedding for each in ids.data], expected, atol=1e-6)


def test_llama_server_s_form(api: httpx.Client, bert: Embedder) -> None:
    raw = bert.embed(TEXTS, normalize=False)
    for path in ("/embedding", "/embeddings"):
        given = {"content": TEXTS, "embd_normalize": -1}
        found = api.post(path, json=given).json()
        assert [each["index"] for each in found] == [0, 1]
        assert np.allclose([each["embedding"][0] for each in found], raw, atol=1e-6)
    largest = api.post("/embeddings", json={"input": TEXTS[0], "embd_normalize": 0}).json()
    assert max(map(abs, largest[0]["embedding"][0])) == pytest.approx(32760)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("", [""]),
        ([12, "hello", 13], [[12, "hello", 13]]),
        (["hello", [12, 13]], ["hello", [12, 13]]),
        ({"prompt_string": "hello"}, ["hello"]),
        ({"content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}, ["hello"]),
        (["a", {"prompt_string": "b"}], ["a", "b"]),
    ],
)
def test_forms_of_inputs(given: Any, texts: Any, api: httpx.Client, bert: Embedder) -> None:
    found = api.post(EMBEDDINGS, json={"input": given}).json()["data"]
    assert np.allclose([each["embedding"] for each in found], bert.embed(texts), atol=1e-6)


def test_ollama_s_client(running: ServerProcess, bert: Embedder) -> None:
    client = of_ollama(running)
    found = client.embed("bert:latest", TEXTS)
    assert np.allclose(found.embeddings, bert.embed(TEXTS), atol=1e-6)
    assert found.model == "bert:latest" and found.prompt_eval_count == 12
    (short,) = client.embed("bert", TEXTS[0], dimensions=4).embeddings
    assert len(short) == 4 and np.linalg.norm(short) == pytest.approx(1)
    old = client.embeddings("bert", TEXTS[0]).embedding
    assert np.allclose(old, bert.embed(TEXTS[0], normalize=False)[0], atol=1e-6)
    long = "hello " * 600
    assert np.allclose(client.embed("bert", long).embeddings, bert.embed(long, truncate=True))
    with pytest.raises(ollama.ResponseError, match="too large: 602 tokens"):
        client.embed("bert", long, truncate=False)
    with pytest.raises(ollama.ResponseError, match="no-such' not found"):
        client.embed("no-such", "a")
    assert client.embed("bert", []).embeddings == []
    assert client.show("bert").capabilities == ["embedding"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/reranking", "/v1/reranking"])
def test_documents_are_scored(path: str, api: httpx.Client, embedders: list[Embedder]) -> None:
    ranker = embedders[1]
    scores = ranker.rerank(QUERY, DOCUMENTS)
    order = np.argsort(-scores).tolist()
    found = api.post(path, json={"query": QUERY, "documents": DOCUMENTS}).json()
    assert [each["index"] for each in found["results"]] == order
    assert np.allclose([each["relevance_score"] for each in found["results"]], scores[order])
    n_tokens = sum(len(ranker.pair_tokens(QUERY, document)) for document in DOCUMENTS)
    assert found["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert found["model"] == "ranker"


def test_forms_of_scores(api: httpx.Client) -> None:
    def asked(**more: Any) -> Any:
        return api.post("/rerank", json={"query": QUERY, **more}).json()

    best = asked(documents=DOCUMENTS)["results"][0]
    (one,) = asked(documents=DOCUMENTS, top_n=1, return_documents=True)["results"]
    assert one == {**best, "document": {"text": DOCUMENTS[best["index"]]}}
    assert len(asked(documents=DOCUMENTS, top_n=9)["results"]) == 3
    objects = [{"text": document} for document in DOCUMENTS]
    assert asked(documents=objects, return_documents=None)["results"][0] == best
    tei = asked(texts=DOCUMENTS)
    assert tei[0] == {"index": best["index"], "score": best["relevance_score"]}
    (shown,) = asked(texts=DOCUMENTS, top_n=1, return_text=True)
    assert shown == {**tei[0], "text": DOCUMENTS[best["index"]]}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (EMBEDDINGS, {}, "input: Field required"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": [[]]}, "input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "2048"),
        (EMBEDDINGS, {"input": {"content": "a"}}, "input.content"),
        (EMBEDDINGS, {"input": {"content": [{"type": "image_url"}]}}, "'text'"),
        (EMBEDDINGS, {"input": [1 << 20]}, "not in the vocabulary"),
        (EMBEDDINGS, {"input": "a", "dimensions": 65}, f"vectors have {N_EMBD}"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "hello " * 600}, "too large: 602 tokens, and bert.gguf reads at"),
        ("/embeddings", {}, "input"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents is missing"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [1]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["hello " * 600]}, "too large: 60"),
        ("/api/embed", {"model": "bert"}, "input"),
        ("/api/embeddings", {"model": "bert"}, "prompt"),
    ],
)
def test_bad_requests(path: str, body: Any, told: str, api: httpx.Client) -> None:
    assert told in error(api.post(path, json=body))


def test_each_model_does_what_it_can(api: httpx.Client) -> None:
    chat = {"messages": user("Hi"), "max_tokens": 1}
    coder = api.post(CHAT, json=chat).json()["model"]
    asked = {"input": "a"}
    told = error(api.post(CHAT, json={**chat, "model": "bert"}))
    assert told == f"bert makes embeddings, not text; name {coder}"
    told = error(api.post(EMBEDDINGS, json={**asked, "model": coder}))
    assert told == f"{coder} makes text, not embeddings; name bert"
    told = error(api.post("/api/embed", json={**asked, "model": "ranker"}))
    assert told == "ranker makes scores of documents, not embeddings; name bert"
    told = error(api.post("/rerank", json={"model": "bert", "query": "a", "documents": ["b"]}))
    assert told == "bert makes embeddings, not scores of documents; name ranker"
    uses = {each["id"]: each["use"] for each in api.get("/v1/models").json()["data"]}
    assert uses == {coder: "chat", "bert": "embedding", "ranker": "rerank"}
    assert len(api.get("/api/ps").json()["models"]) == 3


def passes(client: httpx.Client) -> float:
    """Of the embedding model, until now."""
    (line,) = (
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith('llamacpp:n_decode_total{model_name="bert"}')
    )
    return float(line.split()[-1])


def test_who_leaves_ends_the_work(running: ServerProcess, api: httpx.Client) -> None:
    before, n = passes(api), 500
    body = json.dumps({"input": ["hello " * 400] * n}).encode()
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(posted(EMBEDDINGS, body))
        until(lambda: passes(api) > before)
    until(lambda: any(f"{EMBEDDINGS} 499" in line for line in running.log))
    after = passes(api)
    assert after < before + n
    api.post(EMBEDDINGS, json={"input": "a"}).raise_for_status()
    assert passes(api) <= after + 2  # the one that ran, and this one


def test_chats_are_answered_meanwhile(running: ServerProcess, api: httpx.Client) -> None:
    chat = {"messages": user("Hi"), "max_tokens": 2}
    before, n = passes(api), 100
    with running.client() as client, ThreadPoolExecutor(1) as thread:
        work = thread.submit(client.post, EMBEDDINGS, json={"input": ["hello " * 400] * n})
        until(lambda: passes(api) > before)
        api.post(CHAT, json=chat).raise_for_status()
        assert passes(api) < before + n
        assert len(work.result().json()["data"]) == n


@pytest.mark.slow
def test_models_that_are_loaded_when_they_are_asked_for(
    files: tuple[Path, Path], pair: tuple[Path, Path], tmp_path: Path, bert: Embedder
) -> None:
    settings = tmp_path / "models.toml"
    settings.write_text(
        f"""
        [coder]
        target = "{pair[0]}"
        [mean]
        target = "{files[0]}"
        [last]
        target = "{files[0]}"
        pooling = "last"
        ctx = 16
        """
    )
    with serving("--models", str(settings), "--gpu-layers", "0") as server, server.client() as api:
        found = api.post(EMBEDDINGS, json={"input": TEXTS, "model": "mean"}).json()
        assert np.allclose([e["embedding"] for e in found["data"]], bert.embed(TEXTS), atol=1e-6)
        assert api.post(EMBEDDINGS, json={"input": "a"}).json()["model"] == "mean"
        other = api.post(EMBEDDINGS, json={"input": TEXTS[0], "model": "last"}).json()["data"][0]
        assert not np.allclose(other["embedding"], found["data"][0]["embedding"], atol=0.1)
        too_long = {"input": "a " * 16, "model": "last"}
        assert "18 tokens" in error(api.post(EMBEDDINGS, json=too_long))
        assert "'mean', 'last'" in error(
            api.post(EMBEDDINGS, json={"input": "a", "model": "other"}), 404
        )
        listed = api.get("/v1/models").json()["data"]
        states = {each["id"]: each["status"]["value"] for each in listed}
        assert states == {"coder": "unloaded", "mean": "loaded", "last": "loaded"}
        gone = {"model": "mean", "input": "a", "keep_alive": 0}
        api.post("/api/embed", json=gone).raise_for_status()
        server.wait_for("^unloading mean")


def test_a_server_of_one_embedding_model(files: tuple[Path, Path]) -> None:
    arguments = ("--target", str(files[0]), "--pooling", "none", "--gpu-layers", "0")
    with serving(*arguments, "--alias", "mine") as server, server.client() as api:
        assert not [line for line in server.log if line.startswith(("editors:", "without"))]
        (found,) = api.post("/embeddings", json={"input": TEXTS[0]}).json()
        assert np.shape(found["embedding"]) == (4, N_EMBD)
        assert "pooling none" in error(api.post(EMBEDDINGS, json={"input": TEXTS[0]}))
        chat = {"messages": user("Hi"), "max_tokens": 1}
        told = error(api.post(CHAT, json=chat), 501)
        assert told.startswith("mine makes embeddings, not text; serve one that writes text with")
        assert api.get("/props").json()["is_sleeping"] is False
        assert api.get("/slots").json() == []


@pytest.mark.slow
def test_a_model_of_text_as_one_of_vectors(pair: tuple[Path, Path]) -> None:
    """Of which one request may run, and none wait."""
    arguments = ("--target", str(pair[0]), "--pooling", "last", "--gpu-layers", "0", "--queue", "0")
    with (
        load_embedder(pair[0], pooling="last", n_threads=1, quiet=True) as embedder,
        serving(*arguments) as server,
        server.client() as api,
    ):
        found = api.post(EMBEDDINGS, json={"input": TEXTS}).json()["data"]
        ours = embedder.embed(TEXTS)
        with server.client() as other, ThreadPoolExecutor(1) as thread:
            work = thread.submit(other.post, EMBEDDINGS, json={"input": ["hello " * 400] * 2})
            until(lambda: "llamacpp:requests_processing 1.0" in api.get("/metrics").text)
            refused = api.post(EMBEDDINGS, json={"input": "a"})
            assert "requests wait" in error(refused, 429) and refused.headers["Retry-After"]
            assert len(work.result().json()["data"]) == 2
    assert np.allclose([each["embedding"] for each in found], ours, atol=1e-6)


# A server of chats alone.


def test_openai_s_client_is_told_what_to_do(server: ServerProcess) -> None:
    sent: list[httpx.Request] = []
    http = httpx.Client(trust_env=False, event_hooks={"request": [sent.append]})
    client = of_openai(server, http_client=http, max_retries=2)
    with pytest.raises(openai.InternalServerError) as raised:
        client.embeddings.create(model="any", input="a text")
    assert raised.value.status_code == 501
    assert len(sent) == 1  # it does not try again
    assert raised.value.code == "embedding_not_supported"
    assert "add --embedding-model FILE to `dflash-local serve`" in raised.value.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/embedding", {"content": "a"}), ("/api/embeddings", {"prompt": "a"})),
        *(("/embeddings", {"input": "a"}), ("/api/embed", {"input": "a"})),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_other_clients_are_told_what_to_do(path: str, body: Any, client: httpx.Client) -> None:
    told = error(client.post(path, json=body), 501)
    assert "makes text, not" in told and "--embedding-model" in told
