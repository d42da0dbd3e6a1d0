"""`python -m lab.bench` as maintainers run it: streams, files and exit codes."""

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import command_line
import tiny_coder
from command_line import run_here
from dflash_local.cli import main
from lab.bench.__main__ import NAME, bench
from mini_shapes import DENSE

ROOT = Path(__file__).parents[3]
TARGET, DRAFTER = map(str, tiny_coder.pair())
ALONE = ("--threads", "1", "--gpu-layers", "0")
ON_CPU = (*ALONE, "--draft-shape", "chain,tree")
FEW = ("--max-tokens", "10", "--limit", "1", *ON_CPU)

run = partial(run_here, entry=partial(main.run, command=bench, name=NAME))
refused = partial(command_line.refused, entry=partial(main.run, command=bench, name=NAME))


def told(*arguments: str) -> Any:
    """The output of `--json`: one object, and nothing else."""
    done = run("--json", "-q", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.slow
def test_tables_go_to_stdout_and_to_files(tmp_path: Path) -> None:
    chains = (*FEW, "--draft-shape", "chain")
    arguments = (*chains, "--category", "chat", "--category", "fim", "--temps", "0")
    markdown, picture = tmp_path / "bench.md", tmp_path / "bench.svg"
    files = ("--markdown", str(markdown), "--plot", str(picture))
    done = run(*arguments, *files)
    assert done.returncode == 0, done.stderr
    assert "tokens/s: median" in done.stdout and "rounds by their tokens" in done.stdout
    assert "all 4 equal plain decoding's" in done.stdout
    assert "fill-in-the-middle" in markdown.read_text(encoding="utf-8")
    assert f"{NAME} --max-tokens 10" in markdown.read_text(encoding="utf-8")
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.slow
def test_a_shape_is_written_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_LOCAL_TARGET")
    monkeypatch.setattr("lab.shapes.writer.find_shape", {"tiny": DENSE}.__getitem__)
    shape = ("--shape", "tiny", "--quant", "Q8_0", "--shape-folder", str(tmp_path))
    found = told(*shape, *FEW, "--ctx", "512", "--temps", "0", "--synthetic-length", "3.74")
    assert {row["category"] for row in found["rows"]} == {"random"}
    assert {row["cache"] for row in found["rows"]} == {"cold", "hit"}
    assert len(list(tmp_path.glob("*.gguf"))) == 2


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
    command = [sys.executable, "-m", "lab.bench", "--replay", file, *arguments]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--markdown", markdown], cwd=ROOT, **streams) as process:
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
    text = run("--replay", file, *FEW, "--category", "talk", "--temps", "0").stdout
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


@pytest.mark.slow
def test_a_server_that_does_not_start_costs_no_results(tmp_path: Path) -> None:
    """It comes last, after minutes, and may know no DFlash."""
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho error: unknown argument\nexit 1\n")
    server.chmod(0o755)
    few = (*FEW, "--draft-shape", "chain", "--category", "fim", "--temps", "0")
    done = run("-q", *few, "--against-llama-server", str(server))
    assert done.returncode == 1
    assert "fill-in-the-middle (1)" in done.stdout
    assert f"note: not all was measured: {server} ended with code 1" in done.stdout
    assert done.stderr.endswith(f"{server} ended with code 1: error: unknown argument\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_memory_is_told_of_a_target_alone() -> None:
    found = told(*FEW, "--target", TARGET, "--category", "chat", "--temps", "0")
    assert [row["drafted"] for row in found["rows"]] == [None, None]
    assert found["memory_bytes"]["drafter"] == 0


FAULTS = {
    "--plot picture.gif": ".png or .svg",
    "--plot no/such/folder.png": "no folder",
    "--markdown no/such/folder.md": "no folder",
    f"--shape qwen3-8b --target {TARGET}": "exclude each other",
    "--shape qwen3-8b --draft copies": "exclude each other",
    "--shape no-such-shape": "no shape 'no-such-shape'",
    "--replay no.jsonl": "does not exist",
    "--replay --dataset gsm8k": "exclude each other",
    "--replay --depths 1k": "exclude each other",
    "--replay --against-llama-server /bin/true": "exclude each other",
    "--shape-layers 2": "belongs to --shape",
    f"--against-llama-server {TARGET}": "not executable",
    f"--synthetic-length 6.5 --target {TARGET}": "needs a drafter",
    "--synthetic-length 17": "not a number",
    "--synthetic-length 1.2": "a synthetic accepted length of 1.2; expected 1.57 to",
}


@pytest.mark.parametrize("options", FAULTS)
def test_bad_input_is_one_line_and_exit_code_2(options: str) -> None:
    unset = {"DFLASH_LOCAL_TARGET": ""}
    assert FAULTS[options] in refused("-q", *options.split(), environment=unset)
