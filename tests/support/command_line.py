"""The `dflash-local` command: as a process of its own, and faster in this one."""

import io
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

import click

from dflash_local.cli import main
from ready_command import COMMAND, ReadyRun


def run(
    *arguments: str | bytes, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """The command as its users run it. With variables it is a process from nothing, as Python reads
    some of them when it starts, else a copy of a ready one."""
    if environment:
        return subprocess.run(
            [COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            env={**os.environ, **environment},
            timeout=300,
        )
    return ReadyRun(*arguments, stdin=stdin).finish()


def run_here(
    *arguments: str,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    entry: Callable[[Sequence[str]], int] = main.run,
) -> subprocess.CompletedProcess[str]:
    """The command in this process, which saves the imports: for tests of its answers.

    llama.cpp's own output on stderr is not in the result.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment or {}),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = entry(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def parsed(name: str, arguments: Sequence[str], **settings: Any) -> dict[str, Any]:
    """The values that a command gets of these arguments. It is told of its group: click keeps the
    help option of a command's first context, and the group says that it is `-h`, too."""
    whole = click.Context(main.group, **main.group.context_settings)
    command = main.group.all_commands()[name]
    return command.make_context(name, list(arguments), parent=whole, **settings).params


def refused(
    *arguments: str,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    entry: Callable[[Sequence[str]], int] = main.run,
) -> str:
    """The line that says why the command, in this process, did nothing: bad input."""
    done = run_here(*arguments, stdin=stdin, environment=environment, entry=entry)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.fullmatch(r"dflash-local: error: [^\n]+\n", done.stderr), done.stderr
    return done.stderr
