"""While a model is loaded: who waits is told, who leaves is let go, and the server can end.

Loads are slow here as real ones are: the costs of drafting are measured anew, and for seconds.
"""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from openai_api import CHAT, user
from server_process import ServerProcess, serving, until

SHORT = {"max_tokens": 1, "messages": user("Hi"), "temperature": 0}
SLOW_S = 4

pytestmark = pytest.mark.slow


@contextmanager
def slow_server(pair: tuple[Path, Path], folder: Path, *more: str) -> Iterator[ServerProcess]:
    """A server of a model that is loaded in seconds, and of one in a moment."""
    target, drafter = pair
    environment = {"DFLASH_LOCAL_CACHE": str(folder), "DFLASH_LOCAL_CALIBRATION_S": str(SLOW_S)}
    models = ("--model", f"slow={target},{drafter}", "--model", f"quick={target}")
    with serving(*models, "--gpu-layers", "0", *more, environment=environment) as running:
        yield running


@pytest.fixture
def server(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[ServerProcess]:
    with slow_server(pair, tmp_path) as running:
        yield running


def state(client: httpx.Client, name: str) -> str:
    return str(client.get(f"/v1/models/{name}").json()["status"]["value"])


def test_a_stream_tells_how_far_the_model_is(server: ServerProcess) -> None:
    with server.client() as client, server.client() as other:
        other.post(CHAT, json={"model": "quick", **SHORT}).raise_for_status()
        body = {"model": "slow", **SHORT, "stream": True}
        with client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            assert answer.headers["content-type"].startswith("text/event-stream")
            first = next(lines)
            # So small a file may be read before anybody asks.
            how_far = r"\(\d+ MiB\) \d+ %|and measuring what drafts cost, if that is not known"
            assert re.fullmatch(f": loading slow ({how_far})", first)
            assert state(other, "slow") == "loading"
            # Nobody else has to wait for it.
            assert other.get("/health").json() == {"status": "ok"}
            told = other.post(CHAT, json={"model": "quick", **SHORT})
            assert (told.status_code, told.json()["model"]) == (200, "quick")
            assert state(other, "slow") == "loading"
            rest = [line for line in lines if line]
        comments = [line for line in rest if line.startswith(":")]
        events = [line.removeprefix("data: ") for line in rest if line.startswith("data: ")]
        assert len(comments) + len(events) == len(rest)
        assert all(line.startswith(": loading slow ") for line in comments)
        assert events.pop() == "[DONE]"
        assert all(json.loads(event)["model"] == "slow" for event in events)


def test_an_anthropic_stream_is_pinged_meanwhile(server: ServerProcess) -> None:
    body = {"model": "slow", "max_tokens": 1, "messages": user("Hi"), "stream": True}
    with server.client() as client, client.stream("POST", "/v1/messages", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[0].startswith(": loading slow ")
    assert lines[1:3] == ["event: ping", 'data: {"type":"ping"}']
    assert "event: message_start" in lines and lines[-2] == "event: message_stop"


def test_ollamas_stream_waits_in_silence(server: ServerProcess) -> None:
    body = {"model": "slow", "messages": user("Hi"), "options": {"num_predict": 1}}
    with server.client() as client:
        answer = client.post("/api/chat", json=body)
    *pieces, last = map(json.loads, answer.text.splitlines())
    assert pieces and all(piece["model"] == "slow:latest" for piece in [*pieces, last])
    assert last["load_duration"] > 1e9


def test_a_client_that_leaves_is_waited_for_no_longer(server: ServerProcess) -> None:
    with server.client() as client:
        for stream in (False, True):
            with suppress(httpx.ReadTimeout), server.client() as other:
                other.post(CHAT, json={"model": "slow", **SHORT, "stream": stream}, timeout=0.2)
        until(lambda: state(client, "slow") == "loaded")
        requests = [line for line in server.log if f"POST {CHAT}" in line]
        assert len(requests) == 2
        assert client.get("/slots?model=slow").json()[0]["n_cached_tokens"] == 0
        assert client.post(CHAT, json={"model": "slow", **SHORT}).status_code == 200
    assert sum(line == "loading slow" for line in server.log) == 1


def test_sigterm_lets_those_finish_who_wait_for_a_model(server: ServerProcess) -> None:
    body = {"model": "slow", **SHORT, "stream": True}
    with server.client() as client, client.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith(": loading slow ")
        server.send(signal.SIGTERM)
        server.wait_for("finishing 1 running request")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait() == 0
    assert "Traceback" not in "\n".join(server.log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_in_the_midst_of_a_load(
    server: ServerProcess, number: signal.Signals
) -> None:
    with suppress(httpx.ReadTimeout), server.client() as client:
        client.post(CHAT, json={"model": "slow", **SHORT}, timeout=0.5)
    server.wait_for("^loading slow$")
    server.send(number)
    assert server.wait() == (0 if number == signal.SIGTERM else 128 + number)
    assert "Traceback" not in "\n".join(server.log)
    assert not any(line.startswith("loaded slow") for line in server.log)


def test_who_waits_too_long_is_told_so(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with slow_server(pair, tmp_path, "--queue-timeout", "0.5") as server, server.client() as client:
        late = client.post(CHAT, json={"model": "slow", **SHORT})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        assert int(late.headers["retry-after"]) > 0
        until(lambda: state(client, "slow") == "loaded")
        assert client.post(CHAT, json={"model": "slow", **SHORT}).status_code == 200
