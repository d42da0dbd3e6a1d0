"""`serve --record`: prompts are kept where the user asked for it, for the user alone."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from dflash_local.bench.prompts.prompt import read_prompts
from server_process import serving


def test_prompts_of_all_apis_are_kept_as_the_model_read_them(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.touch(mode=0o644)
    chat = {"messages": [{"role": "user", "content": "Sort a list."}], "max_tokens": 2}
    with serving("--record", str(path), "--parallel", "1") as server, server.client() as client:
        assert any("recording" in line and str(path) in line for line in server.log)
        client.post("/v1/chat/completions", json=chat).raise_for_status()
        whole = {"prompt": "def f(x):", "max_tokens": 2}
        client.post("/v1/completions", json=whole).raise_for_status()
        client.post("/v1/completions", json={"max_tokens": 2, "prompt": []})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["prompt"].startswith("<|im_start|>user\nSort a list.<|im_end|>")
    assert lines[1]["prompt"] == "def f(x):"
    assert [found.text for found in read_prompts(path)] == [line["prompt"] for line in lines]


def test_a_file_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path) -> None:
    from command_line import run_here

    found = run_here("serve", "--port", "0", "--record", str(tmp_path / "no" / "file"))
    assert found.returncode == 2
    assert "--record" in found.stderr
