"""The `dflash-local` command: one file per command, answers on stdout, all else on stderr."""

import sys


def start() -> None:
    """Run the command line and exit the process, as `main.main` does. Ctrl-C ends it without a
    traceback while its parts are imported, too."""
    try:
        from .main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
