"""One request of the command line: its answer on stdout, as text or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .answer import Ask, answer, write_nothing, write_stdout
from .report import Say, json_object, summary

if TYPE_CHECKING:
    from dflash_local import Model

INTERRUPTED = 130


def run_single(model: Model, ask: Ask, values: Mapping[str, Any], say: Say) -> int:
    """Answer, report, and return the exit code: 130 if Ctrl-C cut the answer short."""
    as_json = values["as_json"]
    result = answer(ask, write_nothing if as_json else write_stdout)
    if not as_json and sys.stdout.isatty() and not result.text.endswith("\n"):
        write_stdout("\n")
    say(summary(result, values["max_tokens"]))
    told = json_object(result)
    cancelled = result.finish_reason == "cancelled"
    if values["compare"] and not cancelled:
        from .compare import compare

        compared = compare(model, ask, result, values["draft_width"], say)
        cancelled = compared is None
        if not cancelled:
            told["compare"] = compared
    if as_json:
        # An exactness of drafts that were never made says nothing.
        drafted = result.stats.drafted > 0 and not cancelled
        told["exactness"] = model.exactness().as_dict() if drafted else None
        write_stdout(json.dumps(told) + "\n")
    return INTERRUPTED if cancelled else 0
