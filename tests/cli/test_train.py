"""`dflash-local train` as its users run it: its refusals, in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

import tiny_coder
from command_line import run_here
from ready_command import COMMAND

TARGET, DRAFT = map(str, tiny_coder.pair())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Missing argument"),
        (("nowhere.gguf",), "nowhere.gguf"),
        ((DRAFT,), "drafter"),
        ((TARGET, "--block", "1"), "--block"),
        ((TARGET, "--ctx", "100000"), "--ctx: 100000 is not"),
        ((TARGET, "--data", "{folder}"), "expected at least 3"),
        ((TARGET, "--from", "{folder}"), "no checkpoint to begin with"),
        ((TARGET, "--from", "{folder}", "--layers", "2"), "leave out --layers"),
        ((TARGET, "-o", "{folder}"), "exists already"),
        ((TARGET, "-o", "."), "exists already"),
        ((TARGET, "--teacher-text", __file__), "line 1:"),
    ],
)
def test_what_cannot_be_trained_is_told_in_one_line(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    given = [each.format(folder=folder) for each in arguments]
    if "-o" not in given:
        given += ["-o", str(tmp_path / "out")]
    found = run_here("train", *given, environment={"DFLASH_LOCAL_TUNED": str(tmp_path / "data")})
    assert found.returncode == 2, found.stderr
    assert found.stdout == ""
    assert expected in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr and found.stderr.count("error:") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell that limits files")
def test_a_disk_without_room_is_told_in_one_line_and_left_as_it_was(tmp_path: Path) -> None:
    limited = "trap '' XFSZ; ulimit -f 1000; exec \"$@\""
    arguments = ["train", TARGET, "-o", str(tmp_path / "out"), "--gpu-layers", "0"]
    found = subprocess.run(
        ["bash", "-c", limited, "bash", str(COMMAND), *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert found.returncode == 2, found.stderr
    assert "File too large" in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr
    assert not list(tmp_path.iterdir())
