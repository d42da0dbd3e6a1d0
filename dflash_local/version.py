"""The version of this program."""

from importlib import metadata


def version() -> str:
    """As it is installed; "0" in a source tree that is not."""
    try:
        return metadata.version("dflash-local")
    except metadata.PackageNotFoundError:
        return "0"
