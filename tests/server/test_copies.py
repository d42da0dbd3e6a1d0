"""Requests copy from earlier ones of the same key, and begin like them, and like nobody else's."""

from pathlib import Path

from server_process import EXACT, ServerProcess, serving

MINE, YOURS = "key-of-mine", "key-of-yours"
BODY = {
    "messages": [{"role": "user", "content": "Implement `read_json` in Python."}],
    "temperature": 0,
    "max_tokens": 96,
}


def ask(server: ServerProcess, headers: dict[str, str]) -> tuple[str, int, int]:
    """The answer, how many of its tokens were accepted drafts, which are copies, and how many of
    the prompt's were known."""
    with server.client(headers=headers) as client:
        body = client.post("/v1/chat/completions", json=BODY).json()
    timings, text = body["timings"], body["choices"][0]["message"]["content"]
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] == cached
    return text, timings.get("draft_n_accepted", 0), cached


def test_by_keys(pair: tuple[Path, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(YOURS)
    guard = ("--api-key", MINE, "--api-key-file", str(keys))
    with serving("--target", str(pair[0]), *EXACT, *guard) as server:
        text, alone, unknown = ask(server, {"Authorization": f"Bearer {MINE}"})
        other, apart, anew = ask(server, {"Authorization": f"Bearer {YOURS}"})
        again, copied, known = ask(server, {"x-api-key": MINE})
    assert text == other == again
    assert unknown == anew == 0 < known
    assert copied > 2 * max(alone, apart), (copied, alone, apart)
