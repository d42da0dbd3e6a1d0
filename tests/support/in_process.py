"""The `dflash-local` command in the tests' own process, which starts sooner than one of its own."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from dflash_local.cli.main import run


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


def command(*arguments: str) -> Done:
    """Run `dflash-local` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return Done(code, out.getvalue(), err.getvalue())
