"""`dflash-local convert` as its users run it: what lands where, and what is left when it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import run_here
from convert_command import (
    COMMAND,
    DRAFTER,
    converted,
    online,
    refused,
    settings,
    start,
)
from dflash_local.cli.convert import OUTTYPES
from dflash_local.convert import quantization
from dflash_local.gguf.file import GgufFile
from hf_drafters import write
from hub_stand_in import Hub, running
from synthetic import write_target

N_VOCAB = 320


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny drafter in its published layout, and its target in GGUF."""
    folder = tmp_path_factory.mktemp("made")
    drafter = write(folder / "Tiny-DFlash", "plain", n_vocab=N_VOCAB)
    return drafter, write_target(folder / "target.gguf", n_layer=8, n_vocab=N_VOCAB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the command runs: empty."""
    work = tmp_path / "work"
    work.mkdir()
    return work


# What lands where.


def test_the_path_alone_goes_to_stdout(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    done = converted(drafter, "--target", target, "-o", "d.gguf", folder=folder)
    assert done.stdout == "d.gguf\n"
    assert [path.name for path in folder.iterdir()] == ["d.gguf"]
    lines = done.stderr.splitlines()
    assert any(re.fullmatch(r"writing .*: 100 %", line) for line in lines)
    assert any(line.startswith("checked: ") for line in lines)
    assert lines[-1] == f"next: dflash-local chat --target {target} --draft d.gguf"
    assert "taps after layers 1, 3, 5" in lines[-2]


def test_what_was_converted_fits_its_target(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    path = converted(drafter, "--target", target, folder=folder).stdout.strip()
    assert path == "tiny-dflash-q8_0.gguf"
    done = run_here("inspect", str(folder / path), "--target", str(target), "--json")
    told = json.loads(done.stdout)
    assert told["fit"]["fits"] is True
    assert told["file"]["provenance"]["dflash_local.source"] == "Tiny-DFlash"


def test_json_is_one_object(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    done = converted(drafter, "--target", target, "--outtype", "bf16", "--json", folder=folder)
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["path"] == "tiny-dflash-bf16.gguf"
    assert told["n_bytes"] == (folder / told["path"]).stat().st_size
    assert (told["family"], told["outtype"]) == ("dflash", "bf16")
    assert told["target_layers"] == [2, 4, 6] and told["block_size"] == 16
    assert re.fullmatch(r"[0-9a-f]{64}", told["sha256"])
    assert told["checks"] and told["dry_run"] is False


def test_quiet_says_nothing(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    done = converted(drafter, "--target", target, "-q", folder=folder)
    assert (done.stdout, done.stderr) == ("tiny-dflash-q8_0.gguf\n", "")


def test_a_dry_run_writes_nothing(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    done = converted(drafter, "--target", target, "--dry-run", folder=folder)
    assert done.stdout == "" and not list(folder.iterdir())
    assert "would write tiny-dflash-q8_0.gguf" in done.stderr
    assert "next:" not in done.stderr
    done = converted(drafter, "--target", target, "--dry-run", "--json", folder=folder)
    told = json.loads(done.stdout)
    assert told["dry_run"] is True and told["n_tensors"] > 0 and not list(folder.iterdir())


@pytest.mark.slow
def test_the_target_may_come_from_the_environment(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    given = converted(drafter, "--target", target, "-o", "a.gguf", folder=folder)
    variables = {"DFLASH_LOCAL_TARGET": str(target), "DFLASH_LOCAL_OUTPUT": "b.gguf"}
    done = converted(drafter, folder=folder, environment=variables)
    assert given.stdout == "a.gguf\n" and done.stdout == "b.gguf\n"
    assert (folder / "a.gguf").read_bytes() == (folder / "b.gguf").read_bytes()


def test_what_is_left_out_is_said(folder: Path, tmp_path: Path) -> None:
    drafter = write(tmp_path / "drafter", "reduced", n_vocab=N_VOCAB)
    target = write_target(tmp_path / "target.gguf", n_layer=8, n_vocab=N_VOCAB)
    done = converted(drafter, "--target", target, "--json", folder=folder)
    assert "left out: t2d (the reverse of d2t)" in done.stderr
    told = json.loads(done.stdout)
    assert told["left_out"] == {"t2d": "the reverse of d2t"}


def test_a_path_with_a_space_is_quoted_in_the_hint(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    done = converted(drafter, "--target", target, "-o", "my drafter.gguf", folder=folder)
    assert done.stdout == "my drafter.gguf\n"
    assert done.stderr.splitlines()[-1].endswith("--draft 'my drafter.gguf'")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_bar(made: tuple[Path, Path], folder: Path) -> None:
    import pty

    drafter, target = made
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, "convert", drafter, "--target", target],
        cwd=folder,
        env=settings(),
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"tiny-dflash-q8_0.gguf\n")
    assert b"100%" in shown and b"[####" in shown


# From the hub.


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        yield hub


@pytest.mark.slow
def test_what_the_hub_refuses(
    hub: Hub, made: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    drafter, target = made
    held = {path.name: path.read_bytes() for path in drafter.iterdir()}
    hub.add("lab/Gated", held, gated=True)
    hub.add("lab/Silent", held)
    home = online(hub, tmp_path / "home")
    arguments = ("--target", target)
    assert "gated" in refused("lab/Gated", *arguments, folder=folder, environment=home)
    unknown = refused("lab/None", *arguments, folder=folder, environment=home)
    assert "lab/None" in unknown
    revision = refused(
        "lab/Silent", *arguments, "--revision", "v9", folder=folder, environment=home
    )
    assert "v9" in revision
    assert "--target" in refused("lab/Silent", folder=folder, environment=home)
    offline = {**home, "HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE" in refused("lab/Other", *arguments, folder=folder, environment=offline)


# Ctrl-C.


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Press Ctrl-C; what is on stdout and stderr when it has ended, with the code for that."""
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    return out, error


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("existing", [False, True])
def test_ctrl_c_while_it_writes(existing: bool, tmp_path: Path, folder: Path) -> None:
    n_embd, n_vocab = 1024, 16384
    drafter = write(tmp_path / "drafter", "own-head", n_embd=n_embd, n_vocab=n_vocab)
    target = write_target(
        tmp_path / "target.gguf", n_layer=8, n_embd=n_embd, n_vocab=n_vocab, quant="F32"
    )
    if existing:
        (folder / "d.gguf").write_bytes(b"what was there")
    options = ("--outtype", "q4_k_m", "-o", "d.gguf", "--force")
    process = start(drafter, "--target", target, *options, folder=folder)
    assert process.stderr is not None
    assert any("writing" in line for line in iter(process.stderr.readline, ""))
    out, _ = interrupted(process)
    assert out == ""
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert left == ({"d.gguf": b"what was there"} if existing else {})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_while_it_downloads(
    hub: Hub, made: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    drafter, target = made
    hub.add("lab/Tiny-DFlash", {path.name: path.read_bytes() for path in drafter.iterdir()})
    hub.stalls = threading.Event()
    home = online(hub, tmp_path / "home")
    process = start("lab/Tiny-DFlash", "--target", target, folder=folder, environment=home)
    assert hub.stalls.wait(60)
    out, _ = interrupted(process)
    assert out == "" and not list(folder.iterdir())
    hub.stalls = None
    done = converted("lab/Tiny-DFlash", "--target", target, folder=folder, environment=home)
    assert done.stdout == "tiny-dflash-q8_0.gguf\n"


# Bad input.


def test_an_existing_file_is_kept(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    (folder / "d.gguf").write_bytes(b"what was there")
    line = refused(drafter, "--target", target, "-o", "d.gguf", folder=folder)
    assert "d.gguf" in line and "force" in line
    assert (folder / "d.gguf").read_bytes() == b"what was there"
    converted(drafter, "--target", target, "-o", "d.gguf", "--force", folder=folder)
    assert GgufFile.open(folder / "d.gguf").architecture == "dflash"


@pytest.mark.slow
def test_places_that_cannot_be_written(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    for output in ("no/such/folder/d.gguf", "."):
        line = refused(drafter, "--target", target, "-o", output, folder=folder)
        assert "folder" in line


@pytest.mark.slow
def test_sources_that_are_no_drafter(made: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    _, target = made
    empty = tmp_path / "empty"
    empty.mkdir()
    other = write(
        tmp_path / "other",
        "plain",
        n_vocab=N_VOCAB,
        changes={"architectures": ["LlamaForCausalLM"]},
    )
    for source, words in (
        (empty, "config.json"),
        (other, "LlamaForCausalLM"),
        (target, "folder or a hub id"),
        ("no such thing", "no such folder"),
    ):
        assert words in refused(source, "--target", target, folder=folder)


@pytest.mark.slow
def test_targets_that_it_is_not_for(made: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    drafter, _ = made
    large = write_target(tmp_path / "large.gguf", n_layer=8, n_vocab=352)
    shallow = write_target(tmp_path / "shallow.gguf", n_layer=4, n_vocab=N_VOCAB)
    text = tmp_path / "text.gguf"
    text.write_text("no model at all")
    for target, words in (
        (large, "352"),
        (shallow, "layer"),
        (text, "text.gguf"),
        ("no-such.gguf", "no-such.gguf"),
        (DRAFTER, "drafter"),
    ):
        assert words in refused(drafter, "--target", target, folder=folder)
    assert "--target" in refused(drafter, folder=folder, environment={})


def test_bad_options(made: tuple[Path, Path], folder: Path) -> None:
    drafter, target = made
    arguments = (drafter, "--target", target)
    assert "q9" in refused(*arguments, "--outtype", "q9", folder=folder)
    assert "v1" in refused(*arguments, "--revision", "v1", folder=folder)
    assert "--nothing" in refused(*arguments, "--nothing", folder=folder)
    assert "SOURCE" in refused(folder=folder)


def test_outtypes_are_those_of_the_converter() -> None:
    assert OUTTYPES == quantization.OUTTYPES
