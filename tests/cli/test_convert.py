"""`dflash-local convert` as its users run it: its files, and those left when it fails."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shipped_drafter
from command_line import run_here
from convert_command import TARGET, converted, online, refused, settings
from dflash_local.cli.convert import OUTTYPES
from dflash_local.convert import quantization
from dflash_local.gguf.file import GgufFile
from hf_drafters import write
from hub_stand_in import running
from ready_command import COMMAND
from synthetic import write_target

N_VOCAB = 320


Made = tuple[Path, str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Arguments: a tiny drafter in its published layout, and its target in GGUF."""
    folder = tmp_path_factory.mktemp("made")
    drafter = write(folder / "Tiny-DFlash", "plain", n_vocab=N_VOCAB)
    return drafter, "--target", write_target(folder / "target.gguf", n_layer=8, n_vocab=N_VOCAB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which the command runs: empty."""
    work = tmp_path / "work"
    work.mkdir()
    return work


# What lands where.


def test_the_path_alone_goes_to_stdout(made: Made, folder: Path) -> None:
    done = converted(*made, "-o", "my drafter.gguf", folder=folder)
    assert done.stdout == "my drafter.gguf\n"
    assert [path.name for path in folder.iterdir()] == ["my drafter.gguf"]
    lines = done.stderr.splitlines()
    assert any(re.fullmatch(r"writing .*: 100 %", line) for line in lines)
    assert any(line.startswith("checked: ") for line in lines)
    assert lines[-1] == f"next: dflash-local chat --target {made[2]} --draft 'my drafter.gguf'"
    assert "taps after layers 1, 3, 5" in lines[-2]


def test_what_was_converted_fits_its_target(made: Made, folder: Path) -> None:
    done = converted(*made, "-q", folder=folder)
    assert (done.stdout, done.stderr) == ("tiny-dflash-q8_0.gguf\n", "")
    path = done.stdout.strip()
    done = run_here("inspect", str(folder / path), "--target", str(made[2]), "--json")
    told = json.loads(done.stdout)
    assert told["fit"]["fits"] is True
    assert told["file"]["provenance"]["dflash_local.source"] == "Tiny-DFlash"


def test_json_is_one_object(made: Made, folder: Path) -> None:
    done = converted(*made, "--outtype", "bf16", "--json", folder=folder)
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["path"] == "tiny-dflash-bf16.gguf"
    assert told["n_bytes"] == (folder / told["path"]).stat().st_size
    assert (told["family"], told["outtype"]) == ("dflash", "bf16")
    assert told["target_layers"] == [2, 4, 6] and told["block_size"] == 16
    assert re.fullmatch(r"[0-9a-f]{64}", told["sha256"])
    assert told["checks"] and told["dry_run"] is False


def test_a_dry_run_writes_nothing(made: Made, folder: Path) -> None:
    done = converted(*made, "--dry-run", folder=folder)
    assert done.stdout == "" and not list(folder.iterdir())
    assert "would write tiny-dflash-q8_0.gguf" in done.stderr
    assert "next:" not in done.stderr
    done = converted(*made, "--dry-run", "--json", folder=folder)
    told = json.loads(done.stdout)
    assert told["dry_run"] is True and told["n_tensors"] > 0 and not list(folder.iterdir())


def test_what_is_left_out_is_said(folder: Path, tmp_path: Path) -> None:
    drafter = write(tmp_path / "drafter", "reduced", n_vocab=N_VOCAB)
    target = write_target(tmp_path / "target.gguf", n_layer=8, n_vocab=N_VOCAB)
    done = converted(drafter, "--target", target, "--json", folder=folder)
    assert "left out: t2d (the reverse of d2t)" in done.stderr
    told = json.loads(done.stdout)
    assert told["left_out"] == {"t2d": "the reverse of d2t"}


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_bar(made: Made, folder: Path) -> None:
    from narrow_terminal import lines_on

    arguments = ("convert", *map(str, made), "-o", str(folder / "d.gguf"))
    shown = lines_on(80, *arguments, variables=settings())
    assert str(folder / "d.gguf") in shown
    assert any("100%" in line and "[####" in line for line in shown)


@pytest.mark.slow
def test_a_hub_id_needs_nothing_else(folder: Path, tmp_path: Path) -> None:
    drafter = shipped_drafter.write(tmp_path / "tiny-coder-dflash")
    held = {path.name: path.read_bytes() for path in drafter.iterdir()}
    held["README.md"] = b"---\nlicense: mit\nbase_model: lab/Tiny\n---\n# A drafter\n"
    with running() as hub:
        hub.add("lab/Tiny", {"tiny-Q8_0.gguf": TARGET.read_bytes()})
        commit = hub.add("lab/Tiny-DFlash", held)
        home = online(hub, tmp_path / "home")
        done = converted("lab/Tiny-DFlash", "--json", folder=folder, environment=home)
        told = json.loads(done.stdout)
        assert told["path"] == "tiny-dflash-q8_0.gguf"
        origin = (told["source"], told["revision"], told["target"])
        assert origin == ("lab/Tiny-DFlash", commit, "lab/Tiny/tiny-Q8_0.gguf")
        assert "lab/Tiny, as the drafter says" in done.stderr
        # once more, with no network: the cache holds the drafter, and the bytes are the same
        again = ("lab/Tiny-DFlash", "--revision", commit, "--target", TARGET, "-o", "again.gguf")
        offline = {**home, "HF_HUB_OFFLINE": "1"}
        done = converted(*again, folder=folder, environment=offline)
        assert done.stdout == "again.gguf\n"
        assert (folder / "again.gguf").read_bytes() == (folder / told["path"]).read_bytes()


# Bad input.


def test_an_existing_file_is_kept(made: Made, folder: Path) -> None:
    (folder / "d.gguf").write_bytes(b"what was there")
    line = refused(*made, "-o", "d.gguf", folder=folder)
    assert "d.gguf" in line and "force" in line
    assert (folder / "d.gguf").read_bytes() == b"what was there"
    converted(*made, "-o", "d.gguf", "--force", folder=folder)
    assert GgufFile.open(folder / "d.gguf").architecture == "dflash"


def test_bad_options(made: Made, folder: Path) -> None:
    assert "q9" in refused(*made, "--outtype", "q9", folder=folder)
    assert "v1" in refused(*made, "--revision", "v1", folder=folder)
    assert "--nothing" in refused(*made, "--nothing", folder=folder)
    assert "SOURCE" in refused(folder=folder)


def test_outtypes_are_those_of_the_converter() -> None:
    assert OUTTYPES == quantization.OUTTYPES


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_keeps_what_was_there(tmp_path: Path, folder: Path) -> None:
    n_embd, n_vocab = 1024, 16384
    drafter = write(tmp_path / "drafter", "own-head", n_embd=n_embd, n_vocab=n_vocab)
    target = write_target(
        tmp_path / "target.gguf", n_layer=8, n_embd=n_embd, n_vocab=n_vocab, quant="F32"
    )
    (folder / "d.gguf").write_bytes(b"what was there")
    options = ("--outtype", "q4_k_m", "-o", "d.gguf", "--force")
    process = subprocess.Popen(
        [COMMAND, "convert", drafter, "--target", target, *options],
        cwd=folder,
        env=settings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stderr is not None
    assert any("writing" in line for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "") and "Traceback" not in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "d.gguf": b"what was there"
    }
