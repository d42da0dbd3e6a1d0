"""Text files that somebody names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_local import text_file
from dflash_local.errors import FileError
from dflash_local.text_file import read_text


def test_a_file_is_read_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffä\r\n\n".encode())
    assert read_text(path) == "\ufeffä\r\n\n"
    assert read_text(str(path)) == "\ufeffä\r\n\n"


def test_what_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(FileError, match="0xe9 at 3"):
        read_text(path)


@pytest.mark.skipif(os.name != "posix", reason="devices have no paths there")
def test_devices_and_pipes_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(FileError, match="device or a pipe"):
            read_text(path)
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


def test_nothing_is_an_empty_text() -> None:
    assert read_text(os.devnull) == ""


@pytest.mark.skipif(os.name != "posix", reason="bash gives paths of what it has opened there")
def test_what_a_shell_has_opened_is_read() -> None:
    read = f"{sys.executable} -c 'import sys; from dflash_local.text_file import read_text; "
    for given in ("/dev/stdin", "<(echo ä)"):
        command = f"{read}print(end=read_text(sys.argv[1]))' {given}"
        done = subprocess.run(["bash", "-c", command], input="ä\n".encode(), stdout=subprocess.PIPE)
        assert (done.returncode, done.stdout.decode()) == (0, "ä\n")


def test_texts_have_a_longest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "MOST_BYTES", 8)
    path = tmp_path / "text"
    path.write_text("12345678")
    assert read_text(path) == "12345678"
    path.write_text("123456789")
    with pytest.raises(FileError, match="longer"):
        read_text(path)
