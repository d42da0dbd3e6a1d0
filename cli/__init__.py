"""The `dflash-local` command: one file per command, answers on stdout, all else on stderr."""

from __future__ import annotations

import sys


def begin() -> None:
    """Run the command line and exit the process, also at a Ctrl-C before all is imported."""
    try:
        from .main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
