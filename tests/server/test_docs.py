"""`/docs` tells people what can be called, and all that it says is so."""

import re
import shlex
from html import unescape

import httpx
import pytest

ADDRESS = "http://127.0.0.1:8080"


@pytest.fixture
def text(client: httpx.Client) -> str:
    return client.get("/docs").text


def test_every_route_is_told_of_and_there_is_no_other(text: str, client: httpx.Client) -> None:
    described = {
        f"{method.upper()} {path}"
        for path, methods in client.get("/openapi.json").json()["paths"].items()
        for method in methods
    }
    told = set(re.findall(r"<code>((?:GET|POST|DELETE) /\S+?)</code>", text))
    assert told == described


@pytest.mark.slow
def test_all_examples_work(text: str, client: httpx.Client) -> None:
    (model,) = (entry["id"] for entry in client.get("/v1/models").json()["data"])
    blocks = re.findall(r"<pre[^>]*><code>(.*?)</code></pre>", text, re.DOTALL)
    commands = [unescape(block) for block in blocks if block.startswith("curl ")]
    assert len(commands) > 20
    for command in commands:
        words = shlex.split(command.replace("MODEL", model).replace("\\\n", ""))
        path = words[1].removeprefix(ADDRESS)
        if len(words) == 2:
            answer = client.get(path)
        else:
            assert words[2:5:2] == ["-H", "-d"], command
            header, _, value = words[3].partition(": ")
            answer = client.post(path, content=words[5], headers={header: value})
        assert answer.status_code == 200, (command, answer.text)
