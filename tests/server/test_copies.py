"""Answers copy from earlier requests of the same key, and from nobody else's."""

from __future__ import annotations

from pathlib import Path

from server_process import EXACT, ServerProcess, serving

MINE, YOURS = "key-of-mine", "key-of-yours"
BODY = {
    "messages": [{"role": "user", "content": "Implement `read_json` in Python."}],
    "temperature": 0,
    "max_tokens": 96,
}


def ask(server: ServerProcess, headers: dict[str, str]) -> tuple[str, int]:
    """The answer, and how many of its tokens were accepted drafts: all of them copies."""
    with server.client(headers=headers) as client:
        body = client.post("/v1/chat/completions", json=BODY).json()
    return body["choices"][0]["message"]["content"], body["timings"].get("draft_n_accepted", 0)


def test_by_keys(pair: tuple[Path, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(YOURS)
    guard = ("--api-key", MINE, "--api-key-file", str(keys))
    with serving("--target", str(pair[0]), *EXACT, *guard) as server:
        text, alone = ask(server, {"Authorization": f"Bearer {MINE}"})
        other, apart = ask(server, {"Authorization": f"Bearer {YOURS}"})
        again, copied = ask(server, {"x-api-key": MINE})
    assert text == other == again
    assert copied > 2 * max(alone, apart), (copied, alone, apart)
