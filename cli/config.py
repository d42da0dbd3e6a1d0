"""`dflash-local config`: where the settings file is, and what it sets."""

import os
import sys

import click

from dflash_local.text_file import read_text

from .answer import write_stdout
from .plugins import PluginGroup
from .settings import template
from .user_files import settings_file


@click.command()
@click.option("--edit", is_flag=True, help="Open the file in $EDITOR; a new one lists all options.")
@click.option("--path", "only_path", is_flag=True, help="Print the path of the file alone.")
@click.pass_context
def config(ctx: click.Context, /, edit: bool, only_path: bool) -> None:
    """Show the settings file, or edit it.

    It is TOML: a key is the long name of an option, such as ctx = 8192. At the top of the file it
    holds for each command that has the option; in a table, such as [serve], for that command alone.
    """
    path = settings_file()
    if only_path:
        write_stdout(f"{path}\n")
        return
    if edit:
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not (sys.stdin.isatty() and sys.stdout.isatty()) and not editor:
            raise click.UsageError(
                f"--edit needs a terminal, or an editor in $EDITOR: the file is {path}."
            )
        assert ctx.parent is not None and isinstance(ctx.parent.command, PluginGroup)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(template(ctx.parent.command), encoding="utf-8")
        click.edit(filename=str(path))
        return
    if path.exists():
        write_stdout(f"# {path}\n{read_text(path)}")
    else:
        write_stdout(f"# {path} is not there yet: dflash-local config --edit makes it\n")
