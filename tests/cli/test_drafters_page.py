"""The page of published drafters says of their targets what the code does with them."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_local.fit.architectures import (
    RECURRENT_ARCHITECTURES,
    SNAPSHOT_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
)

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"
COMMAND = re.compile(r"`dflash-local convert ([\w.-]+/[\w.-]+) --target TARGET`")


def rows() -> list[list[str]]:
    cells = [line.strip("|").split("|") for line in PAGE.read_text("utf-8").splitlines()]
    trimmed = [[cell.strip() for cell in row] for row in cells]
    return [row for row in trimmed if COMMAND.fullmatch(row[0])]


def test_every_drafter_stands_there_once() -> None:
    names = [row[0] for row in rows()]
    assert len(names) > 20 and len(set(names)) == len(names)


def test_it_says_for_which_targets_drafts_are_made() -> None:
    for command, _, architecture, engine, drafts, _ in rows():
        name = architecture.strip("`")
        if name in SNAPSHOT_ARCHITECTURES and name in TAPPED_ARCHITECTURES:
            expected = "chains"
        elif name in RECURRENT_ARCHITECTURES:
            expected = "no: recurrent"
        else:
            expected = "yes" if name in TAPPED_ARCHITECTURES else "no: no taps"
        assert drafts == expected, command
        assert engine in ("fused", "llama.cpp"), command
