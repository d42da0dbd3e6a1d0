"""The texts in the cells of a report's tables, and the tables in plain characters."""

import re
import textwrap
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.measure.speed import Speed, Spread
from dflash_local.bench.paper import PaperValue

OURS = "ours (over theirs)"
_NAMES = {"fim": "fill-in-the-middle"}
_KEYS = ("prompts", "temp", "caches", "drafts", "llama-server", "at once", "rows")
"""Columns with the subject of a row."""
_ABOUT = {"temp": "temperature {}", "at once": "{} at once", "caches": "caches {}"}
_TEXT_COLUMNS = {"prompts", "temp", "caches", "drafts", "paper", "llama-server", "rows", "", OURS}
_WRAPPED = {"prompts": 14, "drafts": 12, "llama-server": 12, "paper": 20, OURS: 24}
"""Columns of words, and where they break in a table that is too wide."""
_SPREAD = re.compile(r" \([^()\s]+-[^()\s]+\)$")
_HEAD = 9  # columns: a shorter heading is not broken


def name(category: str) -> str:
    return _NAMES.get(category, category)


Row = Mapping[str, str]


def table(rows: Sequence[Row], width: int | None = None) -> str:
    """For a terminal of so many columns, None for any number; rows may lack columns. Columns of
    numbers are aligned to the right. Where there is no room for it, each row is a paragraph."""
    if fits(rows, width):
        return _plain_table(rows)
    wrapped = [{key: _wrapped(key, value) for key, value in row.items()} for row in rows]
    if width is None or fits(wrapped, width):
        return _plain_table(wrapped)
    return "\n".join(_paragraph(row, width) for row in rows)


def fits(rows: Sequence[Row], width: int | None) -> bool:
    """Whether they make one table with unbroken cells."""
    return width is None or _width(_plain_table(rows)) <= width


def without_spreads(rows: Sequence[Row]) -> list[Row]:
    return [{key: _SPREAD.sub("", value) for key, value in row.items()} for row in rows]


def _plain_table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in columns] for row in rows]
    widths = [max(map(_width, column), default=0) for column in zip(*cells, strict=True)]
    heads = [
        textwrap.fill(name, max(_HEAD, width), break_long_words=False)
        for name, width in zip(columns, widths, strict=True)
    ]
    lines = ["-" * max(pair) for pair in zip(widths, map(_width, heads), strict=True)]
    align = ["left" if name in _TEXT_COLUMNS else "right" for name in columns]
    rows_of_text = [heads, lines, *cells]
    return tabulate(rows_of_text, tablefmt="plain", disable_numparse=True, colalign=align)


def _wrapped(column: str, text: str) -> str:
    limit = _WRAPPED.get(column)
    return text if limit is None else textwrap.fill(text, limit, break_long_words=False)


def _paragraph(row: Row, width: int) -> str:
    """The subject of a row, then its other cells with their names."""
    about = [_ABOUT.get(key, "{}").format(row[key]) for key in _KEYS if row.get(key)]
    cells = [f"{key} {row[key]}" for key in row if key not in _KEYS and row[key]]
    body = textwrap.fill("; ".join(cells), width, initial_indent="  ", subsequent_indent="  ")
    return f"{textwrap.fill(', '.join(about), width)}\n{body}"


def _width(text: str) -> int:
    return max((len(line) for line in text.splitlines()), default=0)


def pipe_table(rows: Sequence[Mapping[str, str]]) -> str:
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


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def paper(value: PaperValue | None) -> str:
    if value is None:
        return ""
    return f"{value.speed_up:.2f}x, {value.accepted_length:.2f} tokens per round"
