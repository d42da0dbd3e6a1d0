"""`dflash-local rm`: remove a fetched pair from the caches."""

import click

from .list import gigabytes
from .options import QUIET, SectionedCommand
from .terminal import Speaker


@click.command(cls=SectionedCommand, sections={"Output": (QUIET,)})
@click.argument("model")
def rm(model: str, quiet: bool) -> None:
    """Remove MODEL and its drafter from this disk.

    MODEL is a name of `dflash-local list`, or a hub repository. With a quantisation, as in
    qwen3-8b:Q8_0, only that is removed. What another name uses stays. Files of your own are not
    touched.
    """
    from dflash_local.pairs.address import read_address
    from dflash_local.pairs.inventory import remove

    address = read_address(model)
    freed = remove(address)
    if not freed:
        raise click.UsageError(f"nothing of {address} is here: see `dflash-local list --here`.")
    Speaker(quiet)(f"removed {address}: {gigabytes(freed)} freed")
