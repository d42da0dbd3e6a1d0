"""`dflash-local tune` and `train` as their users run them: refusals, in one line."""

import os
import socket
import subprocess
import sys
import threading
from importlib.abc import MetaPathFinder
from pathlib import Path

import httpx
import pytest

import tiny_coder
from command_line import run_here
from dflash_local.errors import InputError
from dflash_local_tune.commands.tune import check_torch, is_busy
from ready_command import COMMAND
from server_process import ServerProcess, until

TARGET, DRAFT = map(str, tiny_coder.pair())


REFUSED = {
    "tune": "name a model",
    f"tune one --target {TARGET}": "leave out one",
    f"tune --target {TARGET} --data {{folder}}": "no drafter to begin with",
    f"tune --target {TARGET} --draft {DRAFT} --data {{folder}}": "expected at least 3",
    f"tune --target {TARGET} --draft {DRAFT} --data /nowhere": "does not exist",
    f"tune --target {TARGET} --yield-to 127.0.0.1:8080": "expected an address such as http://",
    f"tune --target {TARGET} --undo": "nothing to undo",
    "train": "Missing argument",
    "train nowhere.gguf": "nowhere.gguf",
    f"train {DRAFT}": "drafter",
    f"train {TARGET} --block 1": "--block",
    f"train {TARGET} --ctx 100000": "--ctx: 100000 is not",
    f"train {TARGET} --data {{folder}}": "expected at least 3",
    f"train {TARGET} --from {{folder}}": "no checkpoint to begin with",
    f"train {TARGET} --from {{folder}} --layers 2": "leave out --layers",
    f"train {TARGET} -o {{folder}}": "exists already",
    f"train {TARGET} -o .": "exists already",
    f"train {TARGET} --teacher-text {__file__}": "line 1:",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_trained_is_told_in_one_line(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    given = command.format(folder=folder).split()
    if "-o" not in given:
        given += ["-o", str(tmp_path / "out")]
    environment = {"DFLASH_LOCAL_TUNED": str(tmp_path / "data"), "DFLASH_LOCAL_TARGET": ""}
    found = run_here(*given, environment=environment)
    assert (found.returncode, found.stdout) == (2, ""), found.stderr
    assert REFUSED[command] in found.stderr.splitlines()[-1]
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_run_without_texts_of_ones_own_fits_a_narrow_terminal(tmp_path: Path) -> None:
    from narrow_terminal import lines_on

    out = tmp_path / "o"
    given = ["--target", TARGET, "--draft", DRAFT, "-o", str(out), "--ctx", "512", "-n", "16"]
    limits = ["--steps", "1", "--gpu-layers", "0", "--threads", "1"]
    data = {"DFLASH_LOCAL_TUNED": str(tmp_path / "data"), "TERM": "xterm-256color"}
    lines = lines_on(40, "tune", *given, *limits, variables=os.environ | data)
    assert (out / f"{out.name}.gguf").is_file(), lines
    assert any("held out" in line and "chains" in line for line in lines)
    # A path is one word, to be copied.
    assert not [line for line in lines if len(line) > 40 and "/" not in line]


@pytest.mark.parametrize(
    ("module", "line", "expected"),
    [
        ("torch", None, "tune needs torch: pip install 'dflash-local[tune]'"),
        ("safetensors", None, "tune needs safetensors: pip install 'dflash-local[tune]'"),
        (
            "torch",
            "raise OSError('libcudart.so.13: cannot open shared object file')",
            "torch, which is installed here but cannot be loaded: libcudart.so.13: cannot open "
            "shared object file; install it again: ",
        ),
        ("torch", "import _lzma_missing", "cannot be loaded: No module named '_lzma_missing'; "),
    ],
)
def test_a_python_without_pytorch_is_told_what_to_install(
    module: str, line: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    if line is None:

        class Hidden(MetaPathFinder):
            def find_spec(self, name: str, *_: object) -> None:
                if name.partition(".")[0] == module:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=module)

        monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    else:
        (tmp_path / f"{module}.py").write_text(f"{line}\n")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as found:
        check_torch("tune")
    assert expected in str(found.value)
    assert "\n" not in str(found.value)


def test_a_server_is_busy_while_it_answers(
    server: ServerProcess, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert not is_busy(server.url)
    long = {"prompt": "def f(x):", "max_tokens": 1500, "stream": True}
    long |= {"ignore_eos": True, "draft_width": 0}  # slower than any question to the server
    seen = False
    for _ in range(20):  # an answer may end before the server is asked
        with client.stream("POST", "/v1/completions", json=long) as answer:
            next(answer.iter_lines())
            seen = is_busy(server.url)
        if seen:
            break
    assert seen
    until(lambda: not is_busy(server.url))
    assert not is_busy("http://127.0.0.1:1")


def test_what_speaks_no_http_is_not_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(4096)
                taken.sendall(b"no status line\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not is_busy(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
