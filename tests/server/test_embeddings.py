"""Who asks for embeddings is told, in the form of the API, that there are none and what to do."""

from __future__ import annotations

import httpx
import openai
import pytest

from server_process import ServerProcess


def test_openai_s_client(server: ServerProcess) -> None:
    sent: list[httpx.Request] = []
    http = httpx.Client(trust_env=False, event_hooks={"request": [sent.append]})
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", http_client=http)
    with pytest.raises(openai.InternalServerError) as raised:
        client.embeddings.create(model="any", input="a text")
    assert raised.value.status_code == 501
    assert len(sent) == 1  # it does not try again
    assert raised.value.code == "embeddings_not_supported"
    assert "llama-server -m MODEL.gguf --embeddings" in raised.value.message


@pytest.mark.parametrize("path", ["/embedding", "/embeddings", "/api/embed", "/api/embeddings"])
def test_other_clients(path: str, client: httpx.Client) -> None:
    answer = client.post(path, json={"input": "a text"})
    assert answer.status_code == 501
    error = answer.json()["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert "makes no embeddings" in message and "\n" not in message
