"""A command on a terminal of so many columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping
from contextlib import suppress

from ready_command import COMMAND

_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def lines_on(columns: int, *arguments: str, variables: Mapping[str, str]) -> list[str]:
    """Its output, without colours; the program ends lines, not the terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    # A size among the variables comes before the terminal's own.
    own = {name: value for name, value in variables.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen([COMMAND, *arguments], env=own, stdin=its, stdout=its, stderr=its)
    os.close(its)
    raw = b""
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(ours, 1 << 16):
            raw += chunk
    os.close(ours)
    process.wait(60)
    return _STYLE.sub("", raw.decode("utf-8", "replace")).replace("\r\n", "\n").split("\n")
