"""`dflash-local bench` as its users run it: streams, files and exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command_line import COMMAND, refused, run_here
from dflash_local import demo
from dflash_local.bench.shapes.writer import write_pair
from mini_shapes import HYBRID

TARGET, DRAFTER = map(str, demo.pair())
ALONE = ("--threads", "1", "--gpu-layers", "0")
ON_CPU = (*ALONE, "--draft-shape", "chain,tree")
FEW = ("--max-tokens", "10", "--limit", "1", *ON_CPU)


def told(*arguments: str) -> Any:
    """What `--json` printed: one object, and nothing else."""
    done = run_here("bench", "--json", "-q", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_tables_go_to_stdout_and_progress_to_stderr(tmp_path: Path) -> None:
    chains = (*FEW, "--draft-shape", "chain")
    arguments = (*chains, "--category", "chat", "--category", "fim", "--temps", "0")
    markdown, picture = tmp_path / "bench.md", tmp_path / "bench.svg"
    files = ("--markdown", str(markdown), "--plot", str(picture))
    done = run_here("bench", *arguments, *files)
    assert done.returncode == 0, done.stderr
    assert "tokens/s: median" in done.stdout and "chat (1)" in done.stdout
    assert "all 4 equal plain decoding's" in done.stdout
    assert "chat, temperature 0: plain" in done.stderr
    assert "fill-in-the-middle" in markdown.read_text(encoding="utf-8")
    assert "dflash-local bench --max-tokens 10" in markdown.read_text(encoding="utf-8")
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    markdown = tmp_path / "bench.md"
    arguments = ("--limit", "999", "-n", "24", *ON_CPU)
    file = tmp_path / "given.jsonl"
    lines = [{"category": "few", "prompt": f"x = {i}\n", "answer": "y = x\n" * 4} for i in range(3)]
    lines += [
        {"category": "many", "prompt": f"z = {i}\n", "answer": "abc\n" * 9} for i in range(999)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with subprocess.Popen(
        [COMMAND, "bench", *arguments, "--replay", str(file), "--markdown", str(markdown)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("few, temperature 0"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out.startswith("interrupted; so far: ") and "few (3)" in out
    assert "interrupted" in err and "Traceback" not in err
    assert "interrupted" in markdown.read_text(encoding="utf-8")


@pytest.mark.slow
def test_json_is_one_object_with_all_that_was_asked_for(tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):", "category": "mine"}\n', encoding="utf-8")
    found = told(*FEW, "--prompts", str(prompts), "--temps", "0,0.5", "--widths", "4,32")
    assert {row["category"] for row in found["rows"]} == {"mine"}
    assert [(way["shape"], way["width"]) for way in found["settings"]["ways"]] == [
        ("chain", "auto"),
        ("tree", "auto"),
        ("chain", 4),
        ("tree", 4),
        ("tree", 32),  # beyond a block
    ]
    assert {row["temperature"] for row in found["rows"]} == {0.0, 0.5}
    assert {row["cache"] for row in found["rows"]} == {"cold", "hit"}
    assert sum(row["n_differing"] for row in found["rows"] if row["shape"] == "chain") == 0
    assert found["n_beyond_rounding"] == 0


def test_trees_are_not_measured_where_none_are_used() -> None:
    few = ("--max-tokens", "10", "--limit", "1", "--category", "chat", "--temps", "0")
    ways = told(*few, *ALONE)["settings"]["ways"]
    assert [(way["shape"], way["width"]) for way in ways] == [("chain", "auto")]


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


@pytest.mark.slow
def test_synthetic_acceptance_is_the_same_for_all_drafts() -> None:
    found = told(
        *(*ON_CPU, "--category", "chat", "--limit", "1", "--temps", "0", "-n", "49"),
        *("--widths", "16", "--synthetic-length", "3.74"),
    )
    assert found["text_is_valid"] is False
    rows = [row for row in found["rows"] if row["width"] == 16]
    chains, trees = ([r for r in rows if r["shape"] == shape] for shape in ("chain", "tree"))
    # Each answer walks through the same passages.
    assert chains[0]["accepted_lengths"] == chains[1]["accepted_lengths"]
    assert trees[0]["accepted_lengths"] == trees[1]["accepted_lengths"]
    assert trees[0]["accepted_length"] > chains[0]["accepted_length"] > 2


def replay_file(folder: Path) -> str:
    file = folder / "given.jsonl"
    lines = [
        {"category": "line", "prompt": f"x = {i}\n", "answer": f"y = {i} + {i}\n" * 12}
        for i in range(2)
    ]
    talk = [{"role": role, "content": "one two three"} for role in ("user", "assistant") * 2]
    lines.append({"category": "talk", "messages": talk})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(file)


@pytest.mark.slow
def test_given_answers_come_out_in_every_way(tmp_path: Path) -> None:
    file = replay_file(tmp_path)
    ways = ("--draft-shape", "chain", "--widths", "8", "--temps", "0,0.8")
    found = told("--replay", file, *ALONE, *ways)
    assert (found["replay"], found["text_is_valid"], found["n_compared"]) == (file, False, 0)
    assert {row["category"] for row in found["rows"]} == {"line", "talk"}
    n_tokens = {row["category"]: row["plain"]["n_tokens"] for row in found["rows"]}
    for row in found["rows"]:
        assert row["plain"]["n_tokens"] == row["drafted"]["n_tokens"] == n_tokens[row["category"]]
    ways = [(way["width"], way["shape"], way["copies"]) for way in found["settings"]["ways"]]
    assert {("auto", "chain", True), ("auto", "chain", False)} < set(ways)
    # Whole answers, as long as the longest.
    assert found["settings"]["max_tokens"] > 60
    text = run_here("bench", "--replay", file, *FEW, "--category", "talk", "--temps", "0").stdout
    assert f"text: given by {file}" in text and "line" not in text.split("prompts")[1]


@pytest.mark.slow
def test_a_target_alone_replays(tmp_path: Path) -> None:
    replay = "--replay", replay_file(tmp_path), "--category", "line"
    found = told(*replay, "--target", TARGET, *ON_CPU)
    (row,) = found["rows"]
    assert (row["temperature"], row["cache"], row["copies"]) == (0.0, "cold", True)
    # What is drafted without a drafter are copies of the text.
    assert row["drafted"]["n_tokens"] == row["plain"]["n_tokens"]


@pytest.mark.slow
def test_replays_of_several_requests_at_once(tmp_path: Path) -> None:
    replay = "--replay", replay_file(tmp_path), "--category", "line"
    rows = told(*replay, *ON_CPU, "--concurrency", "2", "--draft-shape", "chain")["concurrency"]
    assert [(row["concurrency"], row["copies"]) for row in rows] == [(2, True), (2, False)]


def test_a_server_that_does_not_start_costs_no_results(tmp_path: Path) -> None:
    """It comes last, after minutes, and may know no DFlash."""
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho error: unknown argument\nexit 1\n")
    server.chmod(0o755)
    few = (*FEW, "--draft-shape", "chain", "--category", "fim", "--temps", "0")
    done = run_here("bench", "-q", *few, "--against-llama-server", str(server))
    assert done.returncode == 1
    assert "fill-in-the-middle (1)" in done.stdout
    assert f"note: not all was measured: {server} ended with code 1" in done.stdout
    assert done.stderr.endswith(f"{server} ended with code 1: error: unknown argument\n")
    assert done.stderr.count("\n") == 1


def test_a_target_alone_is_decoded_plainly() -> None:
    found = told(*FEW, "--target", TARGET, "--category", "chat", "--temps", "0")
    assert [row["drafted"] for row in found["rows"]] == [None, None]
    assert found["memory_bytes"]["drafter"] == 0


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--draft", DRAFTER), "without its target"),
        (("--target", "no.gguf"), "no such file"),
        (("--widths", "1"), "not a list of whole numbers"),
        (("--draft-shape", "chain,bush"), "not a list of some of chain, tree, auto"),
        (("--depths", "1x"), "not a list of whole numbers"),
        (("--temps", "0,warm"), "not a number"),
        (("--plot", "picture.gif"), ".png or .svg"),
        (("--plot", "no/such/folder.png"), "no folder"),
        (("--markdown", "no/such/folder.md"), "no folder"),
        (("--shape", "qwen3-8b", "--target", TARGET), "exclude each other"),
        (("--shape", "no-such-shape"), "no shape 'no-such-shape'"),
        (("--replay", "no.jsonl"), "does not exist"),
        (("--replay", "--dataset", "gsm8k"), "exclude each other"),
        (("--replay", "--depths", "1k"), "exclude each other"),
        (("--replay", "--against-llama-server", "/bin/true"), "exclude each other"),
        (("--category", "prose"), "not one of the built-in prompts"),
        (("--shape-layers", "2"), "belongs to --shape"),
        (("--dataset-folder", "."), "belongs to --dataset"),
        (("--category", "fim", "--dataset", "gsm8k"), "exclude each other"),
        (("--against-llama-server", TARGET), "not executable"),
        (("--synthetic-length", "6.5", "--target", TARGET), "needs a drafter"),
        (("--synthetic-length", "17"), "not a number"),
        (("--synthetic-length", "1.2"), "a synthetic accepted length of 1.2; expected 1.57 to"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], fault: str) -> None:
    assert fault in refused("bench", "-q", *arguments)


def test_a_width_that_no_pass_has_is_refused_before_the_load() -> None:
    done = run_here("bench", "--widths", "4,17", "--draft-shape", "chain", "-n", "4")
    assert done.returncode == 2 and "--draft-width is 17; this drafter's block" in done.stderr
    assert "context:" not in done.stderr


def test_prompts_that_are_none_are_refused_with_their_line(tmp_path: Path) -> None:
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text('{"prompt": "a"}\nnot json\n', encoding="utf-8")
    assert "line 2" in refused("bench", "-q", "--prompts", str(prompts))
