"""`dflash-local inspect`: its output and exit codes."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import command_line
import tiny_coder
import vision_models
from gguf_files import STRING, UINT32, changed
from hybrid import write_hybrid
from synthetic import Markov, Selector, write_drafter, write_target

TARGET, DRAFTER = map(str, tiny_coder.pair())


def inspect(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    unset = {"DFLASH_LOCAL_TARGET": ""}  # a drafter would be compared with it
    return command_line.run_here("inspect", *map(str, arguments), environment=unset | environment)


def told(*arguments: str | Path, code: int = 0, **environment: str) -> str:
    """Its output; nothing on stderr, unless it ends with an error."""
    done = inspect(*arguments, **environment)
    assert done.returncode == code, done.stderr
    assert bool(done.stderr) == bool(code)
    return done.stdout


def refused(*arguments: str | Path) -> str:
    """The one line on stderr, of a run that printed nothing else."""
    return command_line.refused("inspect", *map(str, arguments))


def row(text: str, name: str) -> str:
    """The text beside `name`."""
    match = re.search(rf"^ +{re.escape(name)} +(.*)$", text, re.MULTILINE)
    assert match is not None, text
    return match[1]


def test_a_drafter() -> None:
    text = told(DRAFTER)
    assert text.startswith("tiny-coder-dflash-b16-q8_0.gguf: a drafter, 10.2 MiB\n")
    assert row(text, "family") == "DFlash"
    assert row(text, "runs on").startswith("the fused draft graph")
    assert row(text, "block") == "16 positions: the anchor and its 15 drafts"
    assert row(text, "taps").startswith("after layers 1, 3, 5 of the target")
    assert row(text, "mask token") == "8191 '<|mask|>'"
    assert row(text, "weights") == "Q8_0 10.0 MiB, F32 17.5 KiB"
    assert row(text, "general.name") == "Drafter"


def test_a_target() -> None:
    text = told(TARGET)
    assert text.startswith("tiny-coder-q8_0.gguf: a target, 29.0 MiB\n")
    assert row(text, "architecture") == "qwen3"
    assert row(text, "layers") == "8, hidden size 512"
    assert row(text, "taps").startswith("yes") and row(text, "roll back").startswith("yes")
    assert row(text, "tokenizer") == row(told(DRAFTER), "tokenizer")


@pytest.mark.slow
def test_what_runs_a_drafter_of_another_family(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target.gguf")
    two = told(write_drafter(tmp_path / "two.gguf", target, selector=Selector()))
    spark = told(write_drafter(tmp_path / "spark.gguf", target, markov=Markov()))
    sinks = told(write_drafter(tmp_path / "sinks.gguf", target, sinks=True, reduced_vocabulary=99))
    assert (row(two, "family"), row(spark, "family")) == ("DFlash 2", "DSpark")
    assert row(spark, "block") == "8 positions: drafts from it on, 8 drafts"
    for text in (two, spark, sinks):
        assert row(text, "runs on") == "the fused draft graph, which knows all of its tensors"
    assert row(sinks, "vocabulary") == "320 tokens, 99 of which are drafted"


def test_windows_and_rope(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target.gguf")
    path = write_drafter(
        tmp_path / "drafter.gguf",
        target,
        n_layer=3,
        sliding_window=24,
        pattern=(True, False, True),
        rope_dimensions=8,
        extra={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 1024,
        },
    )
    text = told(path)
    assert row(text, "window") == "24 tokens in layers 0, 2"
    expected = "base 1e+06, 8 of 16 values of a head, yarn scaling by 4 from 1024 tokens"
    assert row(text, "RoPE") == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("file", [TARGET, DRAFTER])
def test_json_is_one_object(file: str) -> None:
    parsed: dict[str, Any] = json.loads(told(file, "--json"))
    assert parsed["role"] == ("target" if file == TARGET else "drafter")
    assert parsed["file"]["n_bytes"] == Path(file).stat().st_size
    assert parsed["file"]["tokenizer"] == row(told(file), "tokenizer") == "gpt2 (qwen2)"
    weights = [part.split()[0] for part in row(told(file), "weights").split(", ")]
    assert weights == list(parsed["file"]["weights"]) and "fit" not in parsed


def test_a_pair_that_fits() -> None:
    text = told(DRAFTER, "--target", TARGET)
    assert "with the target tiny-coder-q8_0.gguf: they fit" in text
    fit = json.loads(told(DRAFTER, "--target", TARGET, "--json"))["fit"]
    assert fit["fits"] is True and fit["error"] is None


def test_a_pair_that_does_not_fit(tmp_path: Path) -> None:
    other = write_target(tmp_path / "other.gguf", n_layer=8)
    done = inspect(DRAFTER, "--target", other)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("dflash-local: error: hidden size (embedding_length) is 512")
    assert "they do not fit" in done.stdout
    as_json = inspect(DRAFTER, "--target", other, "--json")
    assert as_json.returncode == 2
    fit = json.loads(as_json.stdout)["fit"]
    assert fit["fits"] is False and fit["error"] in line


def test_a_target_without_taps(tmp_path: Path) -> None:
    made = tmp_path / "target.gguf"
    keys = {
        f"gemma3n.{name}": (value, UINT32, None)
        for name, value in (("block_count", 8), ("embedding_length", 512), ("context_length", 64))
    }
    changed(Path(TARGET), made, keys={**keys, "general.architecture": ("gemma3n", STRING, None)})
    text = told(made)
    assert row(text, "taps").startswith("no") and "a small model" in row(text, "drafting")
    done = inspect(DRAFTER, "--target", made)
    assert done.returncode == 2 and "gemma3n" in done.stderr


def test_an_ordinary_model_as_a_drafter(tmp_path: Path) -> None:
    text = told(TARGET, "--target", TARGET)
    assert "a target" in text and "they fit" in text
    assert "taps" not in text.partition("they fit")[2]
    other = write_target(tmp_path / "other.gguf")
    done = inspect(other, "--target", TARGET)
    assert done.returncode == 2 and "vocabulary size is 320 in the drafter" in done.stderr
    assert "they do not fit" in done.stdout


def test_heads_are_told(tmp_path: Path) -> None:
    file = write_hybrid(tmp_path / "head.gguf", "qwen35", Path(TARGET), head=0.0)
    text = told(file)
    assert row(text, "heads").endswith("further tokens: they draft where no drafter is faster")
    assert row(text, "drafting") == "with its heads, with a drafter, or plain"
    assert row(text, "layers").startswith("6, ")
    found = json.loads(told(file, "--json"))
    assert (found["n_heads"], found["n_layer"], found["drafts_with_heads"]) == (1, 6, True)
    assert " heads " not in told(TARGET)
    assert json.loads(told(TARGET, "--json"))["drafts_with_heads"] is False


def test_a_target_in_the_environment_is_for_drafters() -> None:
    assert "they fit" in told(DRAFTER, DFLASH_LOCAL_INSPECT_TARGET=TARGET)
    assert told(TARGET, DFLASH_LOCAL_INSPECT_TARGET=TARGET) == told(TARGET)
    assert told(DRAFTER, DFLASH_LOCAL_TARGET="no/such.gguf") == told(DRAFTER)


@pytest.mark.slow
def test_bad_files(tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(Path(TARGET).read_bytes()[:100_000])
    text = tmp_path / "text.gguf"
    text.write_text("no model at all")
    block = changed(
        Path(DRAFTER), tmp_path / "block.gguf", keys={"dflash.block_size": (1, UINT32, None)}
    )
    for file in (short, text, block):
        assert file.name in refused(file)
        assert file.name in refused(file, "--target", TARGET)
    for file in (short, text):
        assert file.name in refused(DRAFTER, "--target", file)
    assert "block_size" in refused(block)
    assert "no-such.gguf" in refused("no-such.gguf")
    assert "no-such.gguf" in refused(DRAFTER, "--target", "no-such.gguf")
    assert tmp_path.name in refused(tmp_path)
    assert "drafter" in refused(DRAFTER, "--target", DRAFTER)
    assert "FILE" in refused()


@pytest.mark.slow
def test_names_from_a_file_stay_on_their_line(tmp_path: Path) -> None:
    keys = {
        "general.name": ("two\nlines\x1b[31m", STRING, None),
        "general.description": ("long " * 100, STRING, None),
    }
    text = told(changed(Path(DRAFTER), tmp_path / "odd.gguf", keys=keys))
    assert row(text, "general.name").startswith("two lines")
    assert row(text, "general.description").endswith("...")
    assert max(map(len, text.splitlines())) < 120


def test_a_projector(tmp_path: Path) -> None:
    target = vision_models.write_vision_target(tmp_path / "target.gguf", "qwen3vl")
    projector = vision_models.write_projector(tmp_path / "mmproj-target.gguf", target)
    text = told(projector)
    assert text.startswith("mmproj-target.gguf: a projector, ")
    assert row(text, "kind") == "qwen3vl_merger"
    report, other = (json.loads(told("--json", file)) for file in (projector, target))
    assert (report["role"], report["reads"]) == ("projector", ["images"])
    assert report["n_embd"] == other["n_embd"]
