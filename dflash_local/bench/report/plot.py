"""A picture of a report: accepted lengths, what a pass costs, and what drafting gains."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.bench.measure.speed import Way
from dflash_local.bench.report.plot_widths import accepted_by_width, has_widths, speed_by_width
from dflash_local.bench.report.report import Report, temperatures_of
from dflash_local.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")

# Told apart also by those who do not see red or green, and in print (Okabe and Ito 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_INK, _QUIET = "#222222", "#8A8A8A"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "dflash-local",
}
_NAMES = {"fim": "fill in\nthe middle"}


def check_plot(path: Path) -> None:
    """Refuse, before any work, a picture that could not be written. Raises InputError."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path} is not a .png or .svg file; name the picture so")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; make it, or put the picture elsewhere")
    if find_spec("matplotlib") is None:
        raise InputError("a plot needs matplotlib: pip install 'dflash-local[plot]'")


def plot(report: Report, path: Path) -> None:
    """Write the picture, as PNG or SVG by its name. Raises InputError, OSError."""
    check_plot(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
        wide = has_widths(report)
        figure = Figure(figsize=(13, 8.8 if wide else 4.4), layout=layout)
        FigureCanvasAgg(figure)
        parts = figure.subfigures(2 if wide else 1, 1, squeeze=False)[:, 0]
        lengths, costs, ratios = parts[-1].subplots(1, 3, width_ratios=(1.15, 1, 1))
        _accepted_lengths(lengths, report)
        _cost_curve(costs, report)
        _ratios(ratios, report)
        if wide:
            accepted, speed = parts[0].subplots(1, 2)
            accepted_by_width(accepted, report)
            speed_by_width(speed, report)
        figure.suptitle(
            _title(report), x=0.01, ha="left", color=_INK, fontsize=10.5, linespacing=1.5
        )
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=160, facecolor="white", metadata=metadata)


def _title(report: Report) -> str:
    machine = report.machine
    models = f"{machine.target} + {machine.drafter}" if machine.drafter else machine.target
    where = ", ".join(machine.devices)
    if not machine.n_gpu_layers:
        where += f", {machine.n_threads} thread{'s' if machine.n_threads > 1 else ''}"
    text = f"{models}\n{where}"
    if report.synthetic_length is not None:
        text += f" (synthetic acceptance, {report.synthetic_length:g} tokens a round)"
    return text


def _accepted_lengths(axes: Axes, report: Report) -> None:
    """Share of the rounds by tokens that they emitted, a bar per temperature and shape."""
    axes.set_title("How many tokens a round emits")
    found = {pair: report.acceptance(*pair) for pair in _series(report)}
    found = {pair: acceptance for pair, acceptance in found.items() if acceptance.lengths}
    if not found:
        _nothing(axes, "no drafts were checked")
        return
    longest = max(max(acceptance.lengths) for acceptance in found.values())
    width = 0.84 / len(found)
    forced = False
    for i, (pair, acceptance) in enumerate(found.items()):
        total = sum(acceptance.lengths.values())
        places = [length - 0.42 + (i + 0.5) * width for length in range(1, longest + 1)]
        shares = [100 * acceptance.lengths.get(n, 0) / total for n in range(1, longest + 1)]
        label = f"{_named(report, *pair)}: {acceptance.mean_length or 0:.2f} on average"
        forced = forced or report.is_forced(*pair)
        axes.bar(places, shares, width * 0.94, color=_COLOURS[i % 6], label=label)
    axes.set_xlabel("tokens emitted in a round (accepted drafts + 1)")
    axes.set_ylabel("share of rounds, %")
    step = 1 if longest <= 16 else 2
    axes.set_xticks(range(1, longest + 1, step))
    axes.grid(axis="x", visible=False)
    note = "whole blocks, asked for\nwhere plain decoding was faster" if forced else None
    axes.set_ylim(0, (1.1 + 0.1 * (len(found) + 2 * forced)) * axes.get_ylim()[1])
    axes.legend(loc="upper right", title=note, title_fontsize=8.5, alignment="left", fontsize=8.5)


def _series(report: Report) -> list[tuple[float, Way]]:
    return [(t, way) for t in temperatures_of(report.rows) for way in report.main_ways]


def _named(report: Report, temperature: float, way: Way) -> str:
    text = f"temperature {temperature:g}"
    return text if len(report.main_ways) == 1 else f"{text}, {way}"


def _cost_curve(axes: Axes, report: Report) -> None:
    """Milliseconds of a pass of the target by its rows, against as many passes of one row."""
    axes.set_title("What the target's pass costs")
    if not report.curve:
        _nothing(axes, "not measured")
        return
    rows = list(report.curve)
    costs = [1000 * seconds for seconds in report.curve.values()]
    axes.plot(rows, costs, color=_COLOURS[0], marker="o", markersize=5, linewidth=2)
    axes.set_xlabel("rows checked in one pass")
    axes.set_ylabel("milliseconds")
    top = 1.25 * max(costs)
    if rows[0] == 1:
        end = min(rows[-1], top / costs[0])
        axes.plot([1, end], [costs[0], costs[0] * end], color=_QUIET, linestyle=(0, (4, 3)))
        # Beside the line's upper end, on the side where there is room.
        axes.annotate(
            "one by one",
            (1 + 0.82 * (end - 1), costs[0] * (1 + 0.82 * (end - 1))),
            xytext=(7, -3),
            textcoords="offset points",
            va="top",
            color=_QUIET,
        )
    axes.set_ylim(0, top)
    axes.set_xlim(0.5, rows[-1] + 0.8)
    axes.set_xticks([n for n in rows if n in (1, 4, 8, 16, 24, 32, 48, 64)])


def _ratios(axes: Axes, report: Report) -> None:
    """Drafted over plain tokens/s by category: medians, and bars from quartile to quartile."""
    axes.set_title("Speed against plain decoding")
    rows = [row for row in report.main_rows() if row.ratio]
    if not rows:
        _nothing(axes, "no drafts were checked")
        return
    categories = list(dict.fromkeys(row.category for row in rows))
    series = _series(report)
    for i, (temperature, way) in enumerate(series):
        shift = min(0.3, 0.8 / len(series)) * (i - (len(series) - 1) / 2)
        own = [
            (row.category, row.ratio)
            for row in rows
            if row.ratio and row.temperature == temperature and row.way == way
        ]
        medians = [ratio.median for _, ratio in own]
        below = [ratio.median - ratio.low for _, ratio in own]
        above = [ratio.high - ratio.median for _, ratio in own]
        axes.errorbar(
            medians,
            [categories.index(category) + shift for category, _ in own],
            xerr=[below, above],
            fmt=_MARKERS[i % 6],
            color=_COLOURS[i % 6],
            markersize=7,
            elinewidth=2,
        )
        for category, ratio in own:
            told = _named(report, temperature, way)
            named = f" at {told}" if category == categories[0] else ""
            axes.annotate(
                f"{ratio.median:.2f}{named}",
                (ratio.high, categories.index(category) + shift),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=_INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9},
            )
    axes.axvline(1, color=_INK, linewidth=1)
    axes.set_yticks(range(len(categories)), [_NAMES.get(name, name) for name in categories])
    axes.set_ylim(len(categories) - 0.5, -0.5)
    high = max(row.ratio.high for row in rows if row.ratio)
    axes.set_xlim(0, 1.45 * max(high, 1.1))
    axes.set_xlabel("drafted over plain, tokens/s (1 = plain decoding)")
    axes.grid(axis="y", visible=False)


def _nothing(axes: Axes, why: str) -> None:
    axes.set_axis_off()
    axes.text(0, 0.9, why, transform=axes.transAxes, color=_QUIET)
