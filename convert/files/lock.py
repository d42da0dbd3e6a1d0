"""A lock on an open file, which other processes see."""

import sys
from typing import IO, Any


def lock(file: IO[Any]) -> bool | None:
    """True if the file is now this process's, until it is closed; a process that ends in any way
    closes its files. False: another one has it. None: this system, or the file system, knows no
    such locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
