"""The part of a picture that holds chains against trees: what each width accepts, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from dflash_local.bench.measure.single import Row
from dflash_local.bench.measure.speed import Acceptance, Way
from dflash_local.bench.peers.comparison import PeerRow
from dflash_local.bench.report.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOOKS = {"chain": ("#0072B2", "o"), "tree": ("#009E73", "s"), "auto": ("#CC79A7", "P")}
_PEER, _PLAIN, _INK = "#E69F00", "#8A8A8A", "#222222"
_TICKS = (2, 4, 8, 16, 24, 32, 48, 64)

_Value = Callable[[Row], float | None]


def has_widths(report: Report) -> bool:
    """Whether there is more than one way of drafting to be drawn."""
    return len(report.settings.ways) > 1


def accepted_by_width(axes: Axes, report: Report) -> None:
    """Tokens that a round emits."""
    axes.set_title("Tokens a round, by rows checked")
    _draw(axes, report, lambda row: row.shown.mean_length, lambda row: _rows_of(row.shown))
    _draw_peer(axes, report, lambda row: row.accepted_length)
    axes.axhline(1, color=_PLAIN, linestyle=(0, (4, 3)))
    axes.annotate(
        "plain decoding",
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        color=_PLAIN,
        ha="right",
    )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens emitted in a round")


def speed_by_width(axes: Axes, report: Report) -> None:
    """Tokens a second: the mean of the medians of the categories."""
    axes.set_title("Speed, by rows checked")
    _draw(axes, report, _speed, lambda row: row.acceptance.mean_rows)
    _draw_peer(axes, report, lambda row: row.tokens_per_second.median)
    plain = _mean(_first_rows(report), lambda row: _median(row.plain.tokens_per_second))
    if plain is not None:
        axes.axhline(plain, color=_PLAIN, linestyle=(0, (4, 3)), label=f"plain: {plain:.4g}")
    theirs = [row.tokens_per_second.median for row in _peer_rows(report) if not row.n_drafts]
    if theirs:
        label = f"llama-server, plain: {fmean(theirs):.4g}"
        axes.axhline(fmean(theirs), color=_PEER, linestyle=(0, (1, 2)), label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s")
    axes.legend(loc="best", fontsize=8.5)


def _rows_of(found: Acceptance) -> float | None:
    return None if found.nodes is None else 1 + found.nodes


def _speed(row: Row) -> float | None:
    return _median(row.drafted.tokens_per_second) if row.drafted else None


def _median(found: object) -> float | None:
    return getattr(found, "median", None)


def _first_rows(report: Report) -> list[Row]:
    """Those of the first temperature from empty caches, without long prompts where there are
    others."""
    rows = [r for r in report.rows if r.cache == "cold"]
    rows = [r for r in rows if r.temperature == rows[0].temperature]
    return [r for r in rows if r.category not in report.long_categories] or rows


def _peer_rows(report: Report) -> list[PeerRow]:
    rows = _first_rows(report)
    categories = {row.category for row in rows}
    return [
        row
        for row in report.peer
        if row.concurrency == 1
        and row.category in categories
        and row.temperature == rows[0].temperature
    ]


def _draw(axes: Axes, report: Report, value: _Value, rows_of: _Value) -> None:
    """A line for each shape through its fixed widths, a larger mark where the width was chosen, at
    the mean of what it was."""
    rows = _first_rows(report)
    ways = report.settings.ways
    most = max([2.0, *(1.0 + row.n_drafts for row in _peer_rows(report))])
    for shape in dict.fromkeys(way.shape for way in ways):
        colour, marker = _LOOKS[shape]
        fixed = sorted(way.width for way in ways if way.shape == shape and way.width != "auto")
        points = [(width, _mean(_of(rows, Way(width, shape)), value)) for width in fixed]
        known = [(width, found) for width, found in points if found is not None]
        if known:
            xs, ys = zip(*known, strict=True)
            most = max(most, *xs)
            axes.plot(xs, ys, color=colour, marker=marker, markersize=6, linewidth=2, label=shape)
        chosen = _of(rows, Way("auto", shape))
        y, x = _mean(chosen, value), _mean(chosen, rows_of)
        if y is not None and x is not None:
            most = max(most, x)
            label = f"{Way('auto', shape)}: {y:.4g}"
            axes.plot([x], [y], color=colour, marker="*", markersize=14, linestyle="", label=label)
    axes.set_xlabel("rows checked in a round (drafted nodes + 1)")
    axes.set_xscale("log", base=2)
    ticks = [1, *(n for n in _TICKS if n <= most)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.9, 1.2 * most)


def _draw_peer(axes: Axes, report: Report, value: Callable[[PeerRow], float | None]) -> None:
    by_drafts: dict[int, list[float]] = {}
    for row in _peer_rows(report):
        found = value(row)
        if row.n_drafts and found is not None:
            by_drafts.setdefault(row.n_drafts, []).append(found)
    if by_drafts:
        xs = sorted(by_drafts)
        axes.plot(
            [1 + x for x in xs],
            [fmean(by_drafts[x]) for x in xs],
            color=_PEER,
            marker="D",
            linewidth=2,
            label="llama-server, DFlash",
        )


def _of(rows: Sequence[Row], way: Way) -> list[Row]:
    return [row for row in rows if row.way == way]


def _mean(rows: Sequence[Row], value: _Value) -> float | None:
    found = [number for number in map(value, rows) if number is not None]
    return fmean(found) if found else None
