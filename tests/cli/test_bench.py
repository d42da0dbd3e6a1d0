"""`dflash-local bench` as its users run it: streams, files and exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

import mini_pair
from command_line import refused, run_here
from lab.shapes.writer import write_pair
from mini_shapes import HYBRID, HYBRID_HEADS

ALONE = ("--threads", "1", "--gpu-layers", "0")
ON_CPU = (*ALONE, "--draft-shape", "chain,tree")
FEW = ("--max-tokens", "10", "--limit", "1", *ON_CPU)


@pytest.fixture(autouse=True)
def small_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is measured where no other is named."""
    for name, path in zip(("TARGET", "DRAFT"), mini_pair.pair(), strict=True):
        monkeypatch.setenv(f"DFLASH_LOCAL_{name}", str(path))


def told(*arguments: str) -> Any:
    """The output of `--json`: one object, and nothing else."""
    done = run_here("bench", "--json", "-q", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_the_table_goes_to_stdout_and_progress_to_stderr() -> None:
    done = run_here("bench", "--max-tokens", "10", "--limit", "1", *ALONE)
    assert done.returncode == 0, done.stderr
    verdict, table = done.stdout.split("\ntokens/s: median")
    assert verdict and table.count("chat (1)") == table.count("code (1)") == 2
    assert "all 2 equal plain decoding's" in done.stdout
    assert "chat, temperature 0: plain" in done.stderr
    assert "code, temperature 0.8: plain" in done.stderr


@pytest.mark.slow
def test_json_is_one_object_with_all_that_was_asked_for(tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):", "category": "mine"}\n', encoding="utf-8")
    found = told(*FEW, "--prompts", str(prompts), "--temps", "0,0.5", "--widths", "4,32")
    assert {row["category"] for row in found["rows"]} == {"mine"}
    ways = [f"{way['shape']} {way['width']}" for way in found["settings"]["ways"]]
    assert ways == ["chain auto", "tree auto", "chain 4", "tree 4", "tree 32"]  # beyond a block
    machine = found["machine"]
    assert machine["devices"] and (machine["n_threads"], machine["block_size"]) == (1, 16)
    assert machine["target"] == "target-Q8_0.gguf" and machine["kv_type"] == "f16"
    assert {row["temperature"] for row in found["rows"]} == {0.0, 0.5}
    assert sum(row["n_differing"] for row in found["rows"] if row["shape"] == "chain") == 0
    assert found["n_beyond_rounding"] == 0


def test_trees_are_not_measured_where_none_are_used() -> None:
    few = ("--max-tokens", "10", "--limit", "1", "--category", "chat", "--temps", "0")
    ways = told(*few, *ALONE)["settings"]["ways"]
    assert [(way["shape"], way["width"]) for way in ways] == [("chain", "auto")]


@pytest.mark.slow
def test_heads_in_the_targets_own_file_are_measured(tmp_path: Path) -> None:
    target, draft = write_pair(HYBRID_HEADS, "Q8_0", tmp_path, n_layer=4)
    assert draft is None
    few = ("--category", "chat", "--temps", "0", "--widths", "3")
    found = told(*FEW, "--target", str(target), *few)
    assert [way["width"] for way in found["settings"]["ways"]] == ["auto", 3]
    assert all(row["drafted"] for row in found["rows"])
    assert sum(row["n_differing"] for row in found["rows"]) == 0
    found = told(*FEW, "--target", str(target), "--draft", "none", *few[:4])
    assert found["settings"]["ways"] == []


@pytest.mark.slow
def test_trees_are_left_out_for_a_target_with_recurrent_layers(tmp_path: Path) -> None:
    target, draft = map(str, write_pair(HYBRID, "Q8_0", tmp_path, n_layer=4))
    files = ("--target", target, "--draft", draft, "--category", "chat")
    found = told(*FEW, *files, "--temps", "0", "--widths", "4")
    ways = [(way["shape"], way["width"]) for way in found["settings"]["ways"]]
    assert ways == [("chain", "auto"), ("chain", 4)]
    assert sum(row["n_differing"] for row in found["rows"]) == 0
    assert any("recurrent layers, which know no branches" in note for note in found["notes"])


@pytest.mark.slow
def test_requests_at_once_are_measured_too() -> None:
    rows = told(*FEW, "--category", "chat", "--temps", "0", "--concurrency", "1,2")["concurrency"]
    assert [(row["category"], row["concurrency"], row["shape"]) for row in rows] == [
        ("chat", n, shape) for n in (1, 2) for shape in ("chain", "tree")
    ]
    assert all(row["drafted"]["total_tokens_per_second"]["median"] > 0 for row in rows)


def test_a_target_alone_is_decoded_plainly() -> None:
    found = told(*FEW, "--target", str(mini_pair.pair()[0]), "--category", "chat", "--temps", "0")
    assert [row["drafted"] for row in found["rows"]] == [None]


def test_prompts_that_are_none_are_refused_with_their_line(tmp_path: Path) -> None:
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text('{"prompt": "a"}\nnot json\n', encoding="utf-8")
    assert "line 2" in refused("bench", "-q", "--prompts", str(prompts))
