"""The command group, its exit codes, and errors as one line each.

Exit codes: 0 done, 1 the model or its backend failed, 2 bad input, 130 stopped by Ctrl-C.
"""

import difflib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence

import click
from click.core import ParameterSource

from dflash_local.errors import DflashError, FileError, InputError, NotFiniteError
from dflash_local.printable import printable

from .answer import flush_stdout
from .bench import bench
from .calibrate import calibrate
from .chat import chat
from .complete import complete
from .config import config
from .convert import convert
from .deploy import deploy
from .doctor import doctor
from .inspect import inspect
from .list import list_models
from .options import in_options, telling
from .plugins import Plugin, PluginGroup
from .ps import ps
from .pull import pull
from .request import INTERRUPTED
from .rm import rm
from .run import run as run_model
from .serve import serve
from .settings import VARIABLES, default_map, unknown_variables
from .show import show
from .terminal import fitted
from .user_files import settings_file, tilde
from .worker import worker

NAME = "dflash-local"
_WIDEST = 100
"""The most columns of a help text."""
_SENTENCE = 1000
"""More characters than any first sentence of a command's help has."""
FAILED = 1
BAD_INPUT = 2

_LLAMA_CPP = {
    "--cache-ram": "--cache-mb",
    "--cors-origins": "--cors-origin",
    "--mlock": "--load-mode mlock",
    "--models-preset": "--models",
    "--no-mmap": "--load-mode none",
    "--no-ui": "--no-page",
    "--no-webui": "--no-page",
    "--reasoning": "--thinking or --no-thinking",
    "--sleep-idle-seconds": "--keep-alive",
    "--spec-draft-n-max": "--draft-width",
    "--draft-max": "--draft-width",
    "--host-name": "--host",
}
_ON = {
    **dict.fromkeys(("--jinja", "--cont-batching"), "It is always on here: leave it out."),
    "-f": "If it is of -fa: flash attention is on by default.",  # click names the first letter
}
"""llama.cpp's options that are on without being given."""
_COMPLETION = {
    "bash": 'eval "$(_DFLASH_LOCAL_COMPLETE=bash_source dflash-local)"',
    "zsh": 'eval "$(_DFLASH_LOCAL_COMPLETE=zsh_source dflash-local)"',
    "fish": "_DFLASH_LOCAL_COMPLETE=fish_source dflash-local | source",
}


def _versions(_: click.Context) -> Iterator[str]:
    """The version, the llama.cpp build in use, and the backends that it found."""
    from dflash_local.version import version

    yield f"{NAME} {version()}"
    from dflash_local.llama import runtime

    yield runtime.llama_build()
    yield from runtime.backends()


class _Group(PluginGroup):
    """Its help has the first sentence of each command whole, however narrow the terminal is."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, command.get_short_help_str(_SENTENCE))
            for name, command in sorted(self.commands.items())
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Variables"):
            formatter.write_text("Each option is one, too: DFLASH_LOCAL_TARGET for --target.")
            formatter.write_dl(list(VARIABLES.items()))
        with formatter.section("Settings"):
            place = tilde(settings_file())
            formatter.write_text(f"Options can be set for good in {place} (see config -h).")
        with formatter.section("Shell completion"):
            formatter.write_text("In the start-up file of the shell:")
            for shell, line in _COMPLETION.items():  # whole, to be copied
                formatter.write(f"{'':{formatter.current_indent}}{shell:4s}  {line}\n")


@click.group(
    cls=_Group,
    commands=[
        *(bench, calibrate, chat, complete, config, convert, deploy, doctor, inspect),
        *(list_models, ps, pull, rm, run_model, serve, show),
        Plugin("train", help="Make a drafter for a model that has none."),
        Plugin("tune", help="Fit the drafter of a model to your own texts."),
        worker,
    ],
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # click's own choice is never below 50
        "terminal_width": min(shutil.get_terminal_size().columns, _WIDEST) - 2,
    },
)
@click.option(
    "--version",
    help="Show the version, the llama.cpp build and its backends.",
    **telling(_versions),
)
@click.pass_context
def group(ctx: click.Context) -> None:
    """Run GGUF language models faster: a DFlash drafter proposes tokens, the model checks them."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(BAD_INPUT)
    for line in unknown_variables(group):
        _warn(printable(line))
    if ctx.invoked_subcommand != config.name:  # it must show and mend a file that is wrong
        ctx.default_map = default_map(group)


def main(arguments: Sequence[str] | None = None) -> None:
    sys.exit(run(arguments))


def run(
    arguments: Sequence[str] | None = None, command: click.Command = group, name: str = NAME
) -> int:
    """Run the command line; the exit code."""
    _prepare_streams()
    try:
        code = command.main(arguments, prog_name=name, standalone_mode=False)
        flush_stdout()
        return code if isinstance(code, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        asked = f" (see {context.command_path} -h)" if context is not None else ""
        text = _unknown(error) if isinstance(error, click.NoSuchOption) else error.format_message()
        return _fail(text + _target_hint(error) + _origin(error) + asked, BAD_INPUT)
    except BrokenPipeError:
        # The reader has gone. Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # without its number
        named = error.filename is not None and error.strerror is not None
        return _fail(f"{error.filename}: {error.strerror}" if named else str(error), BAD_INPUT)
    except FileError as error:  # it has the words of the file
        return _fail(str(error), BAD_INPUT)
    except (InputError, NotFiniteError) as error:
        return _fail(in_options(str(error)), BAD_INPUT)
    except (DflashError, ImportError, MemoryError) as error:
        return _fail(in_options(str(error)) or type(error).__name__, FAILED)


def _unknown(error: click.NoSuchOption) -> str:
    """Suggest what is nearly the same, and for llama.cpp's names what does their work here."""
    name = error.option_name
    near = difflib.get_close_matches(name, error.possibilities or (), 2, 0.8)
    if name in _ON:
        return f"No such option {name}. {_ON[name]}"
    known = [_LLAMA_CPP[name]] if name in _LLAMA_CPP else near
    hint = f" Did you mean {' or '.join(known)}?" if known else ""
    return f"No such option {name}.{hint}"


def _target_hint(error: click.ClickException) -> str:
    """The way to name a model to a command that was given it as an argument, and to give a switch
    that llama.cpp gives a value."""
    extra = re.fullmatch(r"Got unexpected extra argument \((\S+)\)", error.message)
    ctx = getattr(error, "ctx", None)
    if not extra or ctx is None:
        return ""
    if extra[1] in ("on", "off", "auto"):
        return ": switches take no value; what is on is turned off by --no-..., as --no-flash-attn"
    takes = any(param.name == "target" for param in ctx.command.params)
    if not takes or ctx.get_parameter_source("target") is ParameterSource.COMMANDLINE:
        return ""
    from dflash_local.pairs.address import read_address

    try:
        read_address(extra[1])
    except InputError:
        return ""
    return f": a model is named by --target {extra[1]}"


def _origin(error: click.ClickException) -> str:
    """The source of a value that is in the settings file."""
    param, ctx = getattr(error, "param", None), getattr(error, "ctx", None)
    if param is None or ctx is None:
        return ""
    source = ctx.get_parameter_source(param.name)
    return f" [{settings_file()}]" if source is ParameterSource.DEFAULT_MAP else ""


def _prepare_streams() -> None:
    """Make sure that both streams exist, and replace characters that they cannot encode."""
    for name in ("stdout", "stderr"):
        # A stream that the caller has closed is None, and `print(file=None)` goes to stdout.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (stays open)
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _fail(message: str, code: int) -> int:
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    _warn(f"error: {printable(line)}")
    return code


def _warn(text: str) -> None:
    """Write to stderr; on a terminal broken between words."""
    line = f"{NAME}: {text}\n"
    if sys.stderr.isatty():
        line = fitted(line, shutil.get_terminal_size().columns)
    click.echo(line, err=True, nl=False)
