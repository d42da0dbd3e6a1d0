"""The texts in the cells of a report's tables, and the tables in plain characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.measure.speed import Speed, Spread
from dflash_local.bench.peers.comparison import ServerRow
from dflash_local.bench.peers.paper import PaperValue

OURS = "ours (over theirs)"
_NAMES = {"fim": "fill-in-the-middle"}
_TEXT_COLUMNS = {"prompts", "temp", "caches", "drafts", "paper", "llama-server", "", OURS}


def name(category: str) -> str:
    return _NAMES.get(category, category)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """For a terminal: columns of numbers are aligned to the right. Rows may lack columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in columns] for row in rows]
    align = ["left" if name in _TEXT_COLUMNS else "right" for name in columns]
    return tabulate(cells, columns, tablefmt="simple", disable_numparse=True, colalign=align)


def pipe_table(rows: Sequence[Mapping[str, str]]) -> str:
    """For Markdown."""
    return tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)


def spread(found: Spread | None, form: str = ".4g") -> str:
    """The median, and in brackets the quartiles, or the range of a few values."""
    if found is None:
        return "-"
    if found.n == 1:
        return f"{found.median:{form}}"
    return f"{found.median:{form}} ({found.low:{form}}-{found.high:{form}})"


def ratio(found: Spread | None) -> str:
    return spread(found, ".2f")


def rate(speed: Speed) -> str:
    return "-" if speed.median is None else f"{speed.median:.4g}"


def accepted(row: SpeedRow) -> str:
    return length(row.shown) + ("*" if row.forced else "")


def length(found: Acceptance) -> str:
    return decimal(found.mean_length, 2)


def decimal(value: float | None, places: int = 1) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def paper(value: PaperValue | None) -> str:
    if value is None:
        return ""
    return f"{value.speed_up:.2f}x, {value.accepted_length:.2f} tokens per round"


def server(row: ServerRow) -> dict[str, str]:
    """A whole row about llama-server."""
    theirs = row.tokens_per_second
    return {
        "prompts": name(row.category),
        "llama-server": f"DFlash, {row.n_drafts} drafts" if row.n_drafts else "plain",
        "temp": f"{row.temperature:g}",
        "at once": str(row.concurrency),
        "tokens/s": spread(theirs),
        "tokens per round": "" if row.accepted_length is None else f"{row.accepted_length:.2f}",
        OURS: ", ".join(
            f"{variant}: {speed:.4g} ({speed / theirs.median:.2f})"
            for variant, speed in row.ours.items()
        ),
    }
