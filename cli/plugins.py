"""Commands of another distribution, found by the entry points of `dflash_local.commands`.

They are looked up only where one of them is asked for: that takes as long as half of a start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from dflash_local.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "dflash_local.commands"
_DISTRIBUTION = "dflash-local-tune"
_INSTALL = "pip install 'dflash-local[tune]', or in a checkout pip install ./tune"


class Plugin(click.Command):
    """In the place of a command of that distribution, until it is loaded: its name and the first
    sentence of its help."""


class MissingCommand(click.Command):
    """In the place of a command that cannot be loaded: says why, whatever it is given."""

    def __init__(self, name: str, reason: str) -> None:
        any_words = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(name, add_help_option=False, context_settings=any_words)
        self.reason = reason

    def invoke(self, ctx: click.Context) -> None:
        raise InputError(self.reason)


class PluginGroup(click.Group):
    """Commands, among them plugins."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if isinstance(self.commands.get(args[0]), Plugin):
            self.all_commands()
        return super().resolve_command(ctx, args)

    def all_commands(self) -> Mapping[str, click.Command]:
        """Every command by its name, with plugins loaded."""
        waiting = [name for name, each in self.commands.items() if isinstance(each, Plugin)]
        if waiting:
            from importlib.metadata import entry_points

            found = {entry.name: entry for entry in entry_points(group=GROUP)}
            self.commands.update({name: _loaded(name, found.get(name)) for name in waiting})
        return self.commands


def _loaded(name: str, entry: EntryPoint | None) -> click.Command:
    if entry is None:
        return MissingCommand(name, f"{name} is not installed: {_INSTALL}")
    from dflash_local.version import version

    if entry.dist is not None and entry.dist.version != version():
        return MissingCommand(
            name,
            f"{name} is that of {entry.dist.name} {entry.dist.version}, which does not fit "
            f"dflash-local {version()}: {_INSTALL}",
        )
    try:
        command = entry.load()
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.value} is no command")
    except Exception as error:  # whatever a damaged installation raises
        told = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        return MissingCommand(
            name,
            f"{name} cannot be loaded: {told}; install it again: "
            f"pip install --force-reinstall --no-deps {_DISTRIBUTION}",
        )
    return command
