"""Commands of another distribution, found by the entry points of `dflash_local.commands`.

They are looked up only where one of them is asked for: that takes a third of a start.
"""

from collections.abc import Mapping
from typing import Any

import click

from dflash_local.errors import InputError

GROUP = "dflash_local.commands"
_DISTRIBUTION = "dflash-local-tune"
_INSTALL = "in a checkout pip install ./tune, else pip install 'dflash-local[tune]'"


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

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plugins = {name for name, each in self.commands.items() if isinstance(each, Plugin)}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        self._load(args[0])
        return super().resolve_command(ctx, args)

    def all_commands(self) -> Mapping[str, click.Command]:
        """Every command by its name, with plugins loaded."""
        for name in self.commands:
            self._load(name)
        return self.commands

    def _load(self, name: str) -> None:
        if not isinstance(self.commands.get(name), Plugin):
            return
        try:
            self.commands[name] = _found(name)
        except InputError as error:
            self.commands[name] = MissingCommand(name, str(error))
        except Exception as error:  # whatever a damaged installation raises
            told = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            again = f"pip install --force-reinstall --no-deps {_DISTRIBUTION}"
            reason = f"{name} cannot be loaded: {told}; install it again: {again}"
            self.commands[name] = MissingCommand(name, reason)


def _found(name: str) -> click.Command:
    """The command of a plugin. Raises InputError where it is missing or of another version."""
    from importlib.metadata import entry_points

    from dflash_local.version import version

    entry = next(iter(entry_points(group=GROUP, name=name)), None)
    if entry is None:
        raise InputError(f"{name} is not installed: {_INSTALL}")
    if entry.dist is not None and entry.dist.version != version():
        raise InputError(
            f"{name} is that of {entry.dist.name} {entry.dist.version}, which does not fit "
            f"dflash-local {version()}: {_INSTALL}"
        )
    command = entry.load()
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.value} is no command")
    return command
