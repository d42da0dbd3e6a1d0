"""What llama.cpp logs: shown on stderr where a user asks for it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from dflash_local.llama import runtime


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """The lines that llama.cpp logs meanwhile, but for those for debugging."""
    runtime.init()
    before, runtime._log.echo = runtime._log.echo, 2
    try:
        with redirect_stderr(io.StringIO()) as text:
            yield text
    finally:
        runtime._log.echo = before
