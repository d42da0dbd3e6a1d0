"""What stands in the cells of a report's tables, and the tables in plain characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from dflash_local.bench.measure.single import Row
from dflash_local.bench.measure.speed import Acceptance, Spread
from dflash_local.bench.report.report import PaperValue

_NAMES = {"fim": "fill-in-the-middle"}


def name(category: str) -> str:
    return _NAMES.get(category, category)


def table(rows: Sequence[dict[str, Any]], *, right: Sequence[str]) -> str:
    """Columns by name; those `right` are set to the right."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in columns] for row in rows]
    align = ["right" if name in right else "left" for name in columns]
    return tabulate(cells, columns, tablefmt="simple", disable_numparse=True, colalign=tuple(align))


def spread(found: Spread | None) -> str:
    return _with_range(found, ".4g")


def ratio(found: Spread | None) -> str:
    return _with_range(found, ".2f")


def _with_range(found: Spread | None, form: str) -> str:
    if found is None:
        return "-"
    if found.n == 1:
        return f"{found.median:{form}}"
    return f"{found.median:{form}} ({found.low:{form}}-{found.high:{form}})"


def median(found: Spread | None) -> str:
    return f"{found.median:.4g}" if found else "-"


def accepted(row: Row) -> str:
    return length(row.shown) + ("*" if row.forced else "")


def length(found: Acceptance) -> str:
    return decimal(found.mean_length, 2)


def decimal(value: float | None, places: int = 1) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def paper(value: PaperValue) -> str:
    parts = []
    if value.speed_up is not None:
        parts.append(f"{value.speed_up:.2f}x")
    if value.accepted_length is not None:
        parts.append(f"{value.accepted_length:.2f} accepted")
    return ", ".join(parts)
