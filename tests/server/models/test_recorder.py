"""`serve --record`: prompts are kept where the user asked for it, for the user alone."""

import json
import resource
import stat
from pathlib import Path

import gguf_files
import tiny_coder
from dflash_local import Model
from dflash_local.bench.prompts.case import tokenized
from dflash_local.bench.prompts.prompt import read_prompts
from dflash_local.loading import load
from dflash_local.server.models.recorder import Recorder
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


def test_recorded_prompts_are_read_with_the_tokens_that_they_had(tmp_path: Path) -> None:
    """By a vocabulary that has a token for the start of any text, which is in them already."""
    shipped = tiny_coder.pair()[0]
    texts = gguf_files.parts(shipped)[0]["tokenizer.ggml.tokens"][0]
    start = list(texts).index("<|im_start|>")
    keys = {
        "tokenizer.ggml.bos_token_id": (start, gguf_files.UINT32, None),
        "tokenizer.ggml.add_bos_token": (True, gguf_files.BOOL, None),
    }
    target = gguf_files.changed(shipped, tmp_path / "t.gguf", keys=keys)
    path = tmp_path / "requests.jsonl"
    with load(target, n_ctx=256, n_threads=1, n_gpu_layers=0, quiet=True) as model:
        prompt = model.tokenize("def f(x):")
        assert prompt[0] == start
        Recorder(path, print).add("m", prompt, model.target.vocabulary)
        cases, _ = tokenized(model, read_prompts(path), room=8)
    assert [case.tokens for case in cases] == [prompt]


def test_a_disk_that_is_full_is_told_and_cuts_no_line(model: Model, tmp_path: Path) -> None:
    path, said = tmp_path / "requests.jsonl", list[str]()
    recorder = Recorder(path, said.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def add(n: int) -> None:
        for _ in range(n):
            recorder.add("m", model.tokenize("def f(x):"), model.target.vocabulary)

    add(1)
    n_bytes = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes + n_bytes // 2, before[1]))
    try:
        add(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == n_bytes
    assert len(said) == 1 and str(path) in said[0] and "not recorded" in said[0]
    add(2)
    assert len(said) == 2 and "3 were not" in said[1]
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == 3 * [
        "def f(x):"
    ]
