"""Write the tables of docs/drafters.md from the registry: `python3 tools/write_drafters_page.py`.

Each table stands between two comments, and everything else on the page is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dflash_local.fit.architectures import (
    RECURRENT_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
    rolls_back,
)
from dflash_local.pairs.entry import Entry
from dflash_local.pairs.registry import own_entries

PAGE = Path(__file__).parents[1] / "docs" / "drafters.md"
_TABLE = re.compile(r"(<!-- pairs: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEADS = ("name", "drafter", "target", "architecture", "drafts here", "notes")


def page(text: str, entries: Iterable[Entry]) -> str:
    """The page `text` with the tables of these pairs."""
    known = list(entries)
    return _TABLE.sub(lambda found: f"{found[1]}{_table(known, found[2])}{found[3]}", text)


def _table(entries: Iterable[Entry], family: str) -> str:
    rows = [_row(entry) for entry in entries if entry.family == family]
    lines = [_HEADS, ["---"] * len(_HEADS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(entry: Entry) -> list[str]:
    architecture = f"`{entry.architecture}`"
    drafter = Path(entry.drafter)  # a hub repository, or a file of this package
    named = drafter.name if drafter.is_absolute() else entry.drafter
    cells = [f"`{entry.name}`", f"`{named}`", entry.target, architecture]
    return [*cells, drafts(entry.architecture or ""), entry.notes]


def drafts(architecture: str) -> str:
    """Whether drafts can be made for such a target, and of which shape."""
    if not rolls_back(architecture):
        return "no: recurrent"
    if architecture not in TAPPED_ARCHITECTURES:
        return "no: no taps"
    return "chains" if architecture in RECURRENT_ARCHITECTURES else "yes"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), own_entries()), "utf-8")
