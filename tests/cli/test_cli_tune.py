"""`dflash-local tune` as its users run it: what it refuses, in one line."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import httpx
import pytest

from command_line import run_here
from dflash_local import demo
from dflash_local.cli.tune import is_busy
from server_process import ServerProcess, until

TARGET, DRAFT = map(str, demo.pair())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "name a model"),
        (("one", "--target", TARGET), "leave out one"),
        (("--target", TARGET, "--data", "{texts}"), "no drafter to begin with"),
        (("--target", TARGET, "--draft", DRAFT, "--data", "{texts}"), "expected at least 3"),
        (("--target", TARGET, "--draft", DRAFT, "--data", "/nowhere"), "does not exist"),
        (
            ("--target", TARGET, "--data", "{texts}", "--yield-to", "127.0.0.1:8080"),
            "expected an address such as http://",
        ),
        (("--target", TARGET, "--undo"), "nothing to undo"),
    ],
)
def test_what_cannot_be_tuned_is_told_in_one_line(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    given = [each.format(texts=texts) for each in arguments]
    out = tmp_path / "out"
    found = run_here(
        "tune", *given, "-o", str(out), environment={"DFLASH_LOCAL_TUNED": str(tmp_path / "data")}
    )
    assert found.returncode == 2
    assert found.stdout == ""
    assert expected in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]


def test_a_server_is_busy_while_it_answers(
    server: ServerProcess, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert not is_busy(server.url)
    long = {"prompt": "def f(x):", "max_tokens": 1500, "stream": True}
    long |= {"ignore_eos": True, "draft_width": 0}  # slower than any question to the server
    seen = False
    for _ in range(20):  # an answer may end before the server is asked
        with client.stream("POST", "/v1/completions", json=long) as answer:
            next(answer.iter_lines())
            seen = is_busy(server.url)
        if seen:
            break
    assert seen
    until(lambda: not is_busy(server.url))
    assert not is_busy("http://127.0.0.1:1")


def test_what_speaks_no_http_is_not_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(4096)
                taken.sendall(b"no status line\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not is_busy(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
