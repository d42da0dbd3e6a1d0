"""`dflash-local pull`: fetch a pair, or what is newer of it."""

import click

from .answer import write_stdout
from .options import DRAFT, QUIET, SectionedCommand
from .terminal import Speaker

SECTIONS = {"Model": (DRAFT,), "Output": (QUIET,)}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("model")
def pull(model: str, draft: str | None, quiet: bool) -> None:
    """Fetch MODEL and its drafter, or what the hub has newer of them.

    MODEL is a name of `dflash-local list`, or a hub repository, OWNER/REPO[:QUANT]. Files go to the
    hub client's cache; an interrupted transfer is resumed. The paths of target and drafter go to
    stdout.
    """
    from dflash_local.pairs.find import find_pair

    found = find_pair(model, draft, say=Speaker(quiet), newest=True, bars=not quiet)
    write_stdout(
        "".join(f"{path}\n" for path in (found.target, found.draft) if path and path.is_file())
    )
