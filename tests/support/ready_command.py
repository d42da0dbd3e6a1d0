"""The `dflash-local` command as a copy of a process that has imported it: such a copy starts in a
moment, where a process from nothing imports for a second."""

import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Union

COMMAND = Path(sysconfig.get_path("scripts"), "dflash-local")

# The client of the hub is not among what is imported, as it reads its settings then.
if sys.platform == "linux":
    _CONTEXT = multiprocessing.get_context("forkserver")
    _CONTEXT.set_forkserver_preload(["dflash_local.cli.main", "dflash_local.server.lifecycle"])

Argument = str | bytes | os.PathLike[str]
Stream = IO[bytes] | int
Running = Union["ReadyCommand", subprocess.Popen[bytes]]


def started(
    *arguments: Argument,
    stdin: Stream,
    stdout: Stream,
    stderr: Stream,
    environment: Mapping[str, str],
    folder: Path | None = None,
    has_terminal: bool = False,
) -> Running:
    """The command, or Python code after `-c`, with these variables alone. `folder`: where it runs,
    if not here. `has_terminal`: stdin is the terminal of a session of its own. Elsewhere than on
    Linux it is a process from nothing."""
    words = [*map(os.fsdecode, arguments)]
    if sys.platform == "linux":
        streams = [f if isinstance(f, int) else f.fileno() for f in (stdin, stdout, stderr)]
        return ReadyCommand(words, streams, environment, folder or Path.cwd(), has_terminal)
    return subprocess.Popen(
        [sys.executable if words[0] == "-c" else COMMAND, *words],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=folder,
        start_new_session=has_terminal,
        preexec_fn=_take_terminal if has_terminal else None,
    )


class ReadyCommand:
    """A copy of the ready process. What it has in common with `subprocess.Popen` behaves in the
    same way."""

    def __init__(
        self,
        arguments: Sequence[str],
        files: Sequence[int],
        environment: Mapping[str, str],
        folder: Path,
        has_terminal: bool,
    ) -> None:
        streams = [Connection(os.dup(file)) for file in files]
        self._process = _CONTEXT.Process(
            target=_run, args=(arguments, streams, dict(environment), folder, has_terminal)
        )
        self._process.daemon = True
        try:
            self._process.start()
        finally:
            for stream in streams:
                stream.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("dflash-local", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ReadyRun:
    """One that runs by itself: its stdin is given at once, and its output read at its end."""

    def __init__(
        self,
        *arguments: Argument,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._arguments = arguments
        with ExitStack() as stack:
            given, self._out, self._err = (stack.enter_context(TemporaryFile()) for _ in range(3))
            given.write(stdin)
            given.seek(0)
            self.process = started(
                *arguments,
                stdin=given,
                stdout=self._out,
                stderr=self._err,
                environment=os.environ if environment is None else environment,
                folder=folder,
            )
            self._files = stack.pop_all()

    def finish(self, timeout: float = 300) -> subprocess.CompletedProcess[bytes]:
        with self._files:
            try:
                code = self.process.wait(timeout)
            finally:
                self.process.kill()
            self._out.seek(0)
            self._err.seek(0)
            return subprocess.CompletedProcess(
                self._arguments, code, self._out.read(), self._err.read()
            )


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _run(
    arguments: list[str],
    streams: list[Connection],
    environment: dict[str, str],
    folder: Path,
    has_terminal: bool,
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    if has_terminal:
        os.setsid()
        _take_terminal()
    # The old ones remember what their files could do.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[:1] == ["-c"]:
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
        return
    sys.argv = ["dflash-local", *arguments]
    from dflash_local.cli import start

    start()
