"""The `dflash-local` command: one file per command, answers on stdout, all else on stderr."""
