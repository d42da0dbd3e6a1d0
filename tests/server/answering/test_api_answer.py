"""The end of an answer whose client leaves; names in a request that the server does not know."""

import json
import socket

import httpx
import pytest

import tiny_coder
from dflash_local.server.answering.api_answer import RequestCheck
from dflash_local.server.answering.sampling_fields import SamplingFields
from dflash_local.server.http.errors import ApiError
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import ModelSource
from openai_api import CHAT, COMPLETIONS, user
from raw_http import posted
from server_process import ServerProcess, n_busy, until

LONG = {"prompt": "def f(x):", "max_tokens": 3000, "ignore_eos": True}
SHORT = {"prompt": "def f(x):", "max_tokens": 4}


def test_a_client_that_leaves_frees_its_slot(server: ServerProcess) -> None:
    with server.client() as client:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(posted(COMPLETIONS, json.dumps(LONG).encode()))
            until(lambda: n_busy(client) == 1)
        until(lambda: n_busy(client) == 0)
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_client_that_leaves_a_stream_frees_its_slots(client: httpx.Client) -> None:
    body = {"messages": user("Count"), "n": 3, "stream": True, "ignore_eos": True}
    with client.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        until(lambda: n_busy(client) == 3)
    until(lambda: n_busy(client) == 0)


def test_a_strict_server_refuses_what_it_does_not_know() -> None:
    pool = ModelPool([ModelSource("tiny", tiny_coder.pair()[0])])
    strict, usual = RequestCheck(strict=True), RequestCheck()
    body = SamplingFields.model_validate({"temprature": 0.5, "user": "me"})
    with pytest.raises(ApiError, match="did you mean temperature"):
        strict.check(pool, "tiny", body)
    with pytest.raises(ApiError, match="not found"):
        strict.check(pool, "other", SamplingFields())
    strict.check(pool, None, SamplingFields.model_validate({"user": "me"}))
    usual.check(pool, "other", body)


def test_many_odd_names_hide_no_warning_about_a_model(caplog: pytest.LogCaptureFixture) -> None:
    pool = ModelPool([ModelSource("tiny", tiny_coder.pair()[0])])
    check = RequestCheck()
    for n in range(200):
        check.check(pool, "tiny", SamplingFields.model_validate({f"odd{n}": 1}))
    assert len(caplog.messages) == 100
    for _ in range(2):
        check.tell_once("tiny: has no tokens")
    assert caplog.messages[100:] == ["warning: tiny: has no tokens"]
