"""One request on the command line: where its prompt comes from, and its answer on stdout."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import Any

import click

import dflash_local
from dflash_local.text_file import decoded, read_text

from .answer import Ask, answer, write_answer, write_json
from .report import json_object, summary
from .terminal import Speaker

INTERRUPTED = 130
ANSWER_LENGTH = 1024
"""Tokens of a chat's answer where the pair's own length is not known. A model without an end to its
text would go on to the end of the context."""


def read_prompt(
    argument: str | None, file: str | None = None, *, with_piped: bool = False
) -> str | None:
    """The prompt, byte for byte; None if there is none and standard input is a terminal.

    `-` for either stands for standard input, which is also read if neither is given and it is not a
    terminal. `with_piped` puts what is piped in, or read from a file, before `argument`.
    Raises click.UsageError if both are given, and for text that is not UTF-8.
    """
    if argument is not None and file is not None:
        raise click.UsageError("PROMPT and -f FILE are both given: leave out one of them.")
    if file is not None and file != "-":
        return read_text(file)
    if argument is not None and argument != "-":
        piped = _piped() if with_piped else ""
        return f"{piped.rstrip()}\n\n{argument}" if piped.strip() else argument
    if file is None and argument is None and (sys.stdin is None or sys.stdin.isatty()):
        return None
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: give PROMPT instead of -.")
    return decoded(sys.stdin.buffer.read(), "standard input")


def answer_limit(model: dflash_local.Model, arguments: Mapping[str, Any]) -> int:
    """The most tokens of a chat's answer: what was given, or what the pair is known for."""
    return arguments.get("max_tokens") or model.answer_length or ANSWER_LENGTH


def _piped() -> str:
    """The text on standard input if that is a pipe or a file: others may never end."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    return decoded(sys.stdin.buffer.read(), "standard input")


def run_single(
    model: dflash_local.Model,
    ask: Ask,
    values: Mapping[str, Any],
    say: Speaker,
    *,
    is_chat: bool = False,
) -> int:
    """Ask and report; the exit code, 130 after Ctrl-C."""
    as_json = values["as_json"]
    result = answer(ask) if as_json else write_answer(ask, say, is_chat=is_chat)
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
        write_json(report)
    return INTERRUPTED if cancelled else 0
