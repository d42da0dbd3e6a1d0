"""One request on the command line: where its prompt comes from, and its answer on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .answer import Ask, answer, write_nothing, write_stdout
from .report import Say, json_object, summary
from .values import decoded, read_text

if TYPE_CHECKING:
    from dflash_local import Model

INTERRUPTED = 130


def read_prompt(argument: str | None, file: str | None = None) -> str | None:
    """The prompt, byte for byte; None if there is none and standard input is a terminal.

    `-` for either stands for standard input, which is also read if neither is given and it is not a
    terminal. Raises click.UsageError if both are given, and for text that is not UTF-8.
    """
    if argument is not None and file is not None:
        raise click.UsageError("PROMPT and -f FILE are both given: leave out one of them.")
    if file is not None and file != "-":
        return read_text(Path(file))
    if argument is not None and argument != "-":
        return argument
    if file is None and argument is None and (sys.stdin is None or sys.stdin.isatty()):
        return None
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: give PROMPT instead of -.")
    return decoded(sys.stdin.buffer.read(), "standard input")


def run_single(model: Model, ask: Ask, values: Mapping[str, Any], say: Say) -> int:
    """Answer, report, and return the exit code: 130 if Ctrl-C cut the answer short."""
    as_json = values["as_json"]
    result = answer(ask, write_nothing if as_json else write_stdout)
    if not as_json and sys.stdout.isatty() and not result.text.endswith("\n"):
        write_stdout("\n")
    say(summary(result, values["max_tokens"]))
    report = json_object(result)
    cancelled = result.finish_reason == "cancelled"
    if values["compare"] and not cancelled:
        from .compare import compare

        compared = compare(model, ask, result, values["draft_width"], say)
        cancelled = compared is None
        if not cancelled:
            report["compare"] = compared
    if as_json:
        # Exactness says nothing if no draft was checked.
        drafted = result.stats.drafted > 0 and not cancelled
        report["exactness"] = model.exactness().as_dict() if drafted else None
        write_stdout(json.dumps(report) + "\n")
    return INTERRUPTED if cancelled else 0
