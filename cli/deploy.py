"""`dflash-local deploy`: how another engine serves a pair to many."""

import click

from dflash_local.errors import InputError
from dflash_local.pairs.deploy import WAYS, Deployment

from .answer import write_stdout
from .options import Option, SectionedCommand
from .values import whole

SECTIONS = {
    "Output": (
        Option(
            "--to",
            "The engine, or the kind of manifest, which is vLLM's.",
            type=click.Choice(list(WAYS)),
            required=True,
        ),
        Option(
            "-o --output FILE",
            "Write it to this file.",
            of="deploy",
            type=click.Path(dir_okay=False),
        ),
    ),
    "Model": (
        Option(
            "--ctx n_ctx",
            "Context length.",
            of="deploy",
            type=whole(1),
            show_default="the engine's",
        ),
        Option(
            "--draft-tokens n_drafts",
            "Tokens to draft in a round.",
            type=whole(1, 63),
            show_default="as the drafter's makers do",
        ),
    ),
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("name")
def deploy(name: str, to: str, output: str | None, n_ctx: int | None, n_drafts: int | None) -> None:
    """Print how vLLM, SGLang or llama-server serves NAME of `dflash-local list` to a team.

    The name of the model and the API stay the same, so clients only change the address.
    """
    from dflash_local.pairs import registry

    found = registry.named(name)
    if found is None:
        raise InputError(f"no pair is called {name}; {registry.hint(name)}")
    text = WAYS[to](Deployment(found[0], n_ctx, n_drafts))
    if output is None:
        write_stdout(text)
        return
    with open(output, "w", encoding="utf-8") as file:
        file.write(text)
