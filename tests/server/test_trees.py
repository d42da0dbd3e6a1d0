"""A server that drafts trees, and several clients at once: each has the answer of plain decoding,
whatever becomes of the others."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tiny_coder
from dflash_local import Model
from server_process import ServerProcess, n_busy, serving, until

N = 24
ROUNDS_HARDLY = ("--kv-type", "f32", "--no-flash-attn", "--gpu-layers", "0", "--threads", "1")
"""With weights in F32: there trees are plain decoding's to a hair."""
SEEDED = {"temperature": 0.8, "seed": 7, "repeat_penalty": 1.1}


@pytest.fixture(scope="module")
def trees(f32_target: Path) -> Iterator[ServerProcess]:
    """Three slots for six clients; wider than any chain."""
    files = "--target", str(f32_target), "--draft", str(tiny_coder.pair()[1])
    drafts = "--draft-shape", "tree", "--draft-width", "32"
    with serving(*files, *ROUNDS_HARDLY, *drafts, "--parallel", "3", "--ctx", "1024") as server:
        yield server


def asked(server: ServerProcess, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": N, "temperature": 0.0, "return_tokens": True, **options}
    with server.client() as client:
        answer = client.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def given_up(server: ServerProcess, prompt: str) -> str:
    """A client that is gone after the first part of its answer."""
    body = {"prompt": prompt, "n_predict": 900, "ignore_eos": True, "stream": True}
    with (
        server.client() as client,
        client.stream("POST", "/completion", json={**body, "temperature": 0.0}) as answer,
    ):
        assert answer.status_code == 200
        return next(line for line in answer.iter_lines() if line)


@pytest.mark.slow
def test_several_clients_some_of_whom_leave(trees: ServerProcess, tree_model: Model) -> None:
    code, chat = tiny_coder.prompts()["code"], tiny_coder.prompts()["chat"]
    whole = tree_model.generate(code[0], max_tokens=N, draft_width=0).text
    wanted: list[tuple[str, dict[str, Any]]] = [
        (code[0], {}),
        (chat[0], SEEDED),
        (code[0], {"stop": [whole[len(whole) // 2 :][:4]]}),
        (code[1], {"json_schema": True, **SEEDED}),
        (code[1], {}),
        (code[0], SEEDED),  # a second time, after some have left
    ]
    calls: list[Callable[[], Any]] = [
        lambda each=each: asked(trees, *each)  # type: ignore[misc]
        for each in wanted[:4]
    ]
    calls[2:2] = [lambda: given_up(trees, chat[1]), lambda: given_up(trees, code[0])]
    with ThreadPoolExecutor(6) as clients:
        found = [each.result(120) for each in [clients.submit(call) for call in calls]]
        found += clients.map(lambda each: asked(trees, *each), wanted[4:])
    gone = [each for each in found if isinstance(each, str)]
    assert len(gone) == 2 and all(each.startswith("data: ") for each in gone)
    answers = [each for each in found if not isinstance(each, str)]
    for (prompt, options), told in zip(wanted, answers, strict=True):
        tree_model.forget()
        plain = tree_model.generate(prompt, max_tokens=N, draft_width=0, **options)
        assert told["tokens"] == plain.tokens
        assert told["content"] == plain.text
    assert sum(told["timings"].get("draft_n_accepted", 0) for told in answers) > N
    with trees.client() as client:
        until(lambda: n_busy(client) == 0)  # those of the clients that left, too
        counts = client.get("/metrics").text
    written = re.search(r"^llamacpp:tokens_predicted_total(?:{.*})? (\d+)", counts, re.MULTILINE)
    assert written is not None
    assert int(written[1]) < 900, "a client that left had its whole answer written"
    assert not any("Traceback" in line for line in trees.log)
