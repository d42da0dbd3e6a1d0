"""The end of an answer whose client leaves."""

import json
import socket

import httpx

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
