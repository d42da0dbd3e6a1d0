"""A picture of a report: acceptance and speed by width, accepted lengths, the costs of a pass, and
the gain of drafting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dflash_local.bench.measure.settings import Variant
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.report import remarks
from dflash_local.errors import InputError
from lab.bench.comparison import ServerRow
from lab.bench.report import LabReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")

# Colours that can be told apart without seeing red or green, and in print (Okabe and Ito 2008).
_BLUE, _ORANGE, _GREEN, _PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
_COLOURS = (_BLUE, _ORANGE, _GREEN, _PINK, "#56B4E9", "#D55E00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_OF_SHAPE = {"chain": (_BLUE, "o"), "tree": (_GREEN, "s"), "auto": (_PINK, "P")}
_INK, _QUIET = "#222222", "#8A8A8A"
_DASHED, _DOTTED = (0, (4, 3)), (0, (1, 2))
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
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.title_fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "dflash-local",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
_NAMES = {"fim": "fill in\nthe middle"}
_WIDTH_TICKS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_NO_DRAFTS = "no drafts were checked"

Panel: TypeAlias = Callable[["Axes", LabReport], None]
Row = TypeVar("Row", SpeedRow, ServerRow)


def check_plot(path: Path) -> None:
    """Refuse, before any work, a picture that could not be written. Raises InputError."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path} is not a .png or .svg file; name the picture so")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; make it, or put the picture elsewhere")
    if find_spec("matplotlib") is None:
        raise InputError("a plot needs matplotlib: pip install matplotlib")


def plot(report: LabReport, path: Path) -> None:
    """Write the picture, as PNG or SVG by its name. Raises InputError, OSError."""
    check_plot(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
        by_width = any(variant.width != "auto" for variant in report.settings.variants)
        heights = [*([4.4] if by_width else []), max(4.4, 1.4 + 0.22 * _n_ratios(report))]
        figure = Figure(figsize=(13, sum(heights)), layout=layout)
        FigureCanvasAgg(figure)
        parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        panels = _panels(report)
        for draw, axes in zip(
            panels, parts[-1].subplots(1, len(panels), squeeze=False)[0], strict=True
        ):
            draw(axes, report)
        if by_width:
            accepted, speed = parts[0].subplots(1, 2)
            accepted_by_width(accepted, report)
            speed_by_width(speed, report)
        figure.suptitle(
            _title(report), x=0.01, ha="left", color=_INK, fontsize=10.5, linespacing=1.5
        )
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=160, facecolor="white", metadata=metadata)


def _panels(report: LabReport) -> list[Panel]:
    """The panels for the main variants; at least one."""
    found: list[Panel] = []
    if any(report.acceptance(*pair).lengths for pair in _series(report)):
        found.append(accepted_lengths)
    if report.curve:
        found.append(_cost_curve)
    if _n_ratios(report):
        found.append(_ratios)
    elif any(row.plain.median for row in report.main_rows):
        found.append(_plain_speeds)
    return found or [_nothing]


def _n_ratios(report: LabReport) -> int:
    return sum(row.ratio is not None for row in report.main_rows)


def _title(report: LabReport) -> str:
    environment = report.environment
    models = [name for name in (environment.target, environment.drafter) if name]
    where = ", ".join(environment.devices)
    if not environment.n_gpu_layers:
        where += f", {remarks.threads(environment)}"
    text = f"{' + '.join(models)}\n{where}"
    if report.synthetic_length is not None:
        text += f" (synthetic acceptance, {report.synthetic_length:g} tokens per round)"
    if report.replay is not None:
        text += f"; text given by {report.replay}"
    return text


# By width: chains against trees


def accepted_by_width(axes: Axes, report: LabReport) -> None:
    """Tokens that a round emits."""
    axes.set_title("Tokens per round, by rows checked")
    _by_width(axes, report, lambda row: row.shown.mean_length, _shown_rows)
    _server_by_drafts(axes, report, lambda row: row.accepted_length)
    axes.axhline(1, color=_QUIET, linestyle=_DASHED)
    axes.annotate(
        "plain decoding",
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        color=_QUIET,
        ha="right",
    )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens per round")


def speed_by_width(axes: Axes, report: LabReport) -> None:
    """Tokens/s: the mean of the medians of the categories."""
    axes.set_title("Speed, by rows checked")
    _by_width(axes, report, lambda row: row.drafted_median, lambda row: row.acceptance.mean_rows)
    _server_by_drafts(axes, report, lambda row: row.tokens_per_second.median)
    plain = _mean(_first_rows(report), lambda row: row.plain.median)
    if plain is not None:
        axes.axhline(plain, color=_QUIET, linestyle=_DASHED, label=f"plain: {plain:.4g}")
    undrafted = [row for row in _first_server_rows(report) if not row.n_drafts]
    theirs = _mean(undrafted, lambda row: row.tokens_per_second.median)
    if theirs is not None:
        label = f"llama-server, plain: {theirs:.4g}"
        axes.axhline(theirs, color=_ORANGE, linestyle=_DOTTED, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s")
    axes.legend(loc="best", frameon=True, edgecolor="none")


def _by_width(
    axes: Axes,
    report: LabReport,
    value: Callable[[SpeedRow], float | None],
    mean_rows: Callable[[SpeedRow], float | None],
) -> None:
    """A line for each shape through its fixed widths; a star where the width was chosen, at the
    mean of the rows."""
    rows = _first_rows(report)
    most = max([2.0, *(1.0 + row.n_drafts for row in _first_server_rows(report))])
    variants = report.settings.variants
    for shape in dict.fromkeys(variant.shape for variant in variants):
        colour, marker = _OF_SHAPE[shape]
        widths = sorted(v.width for v in variants if v.shape == shape and v.width != "auto")
        points = {
            float(width): _mean([r for r in rows if r.variant == Variant(width, shape)], value)
            for width in widths
        }
        most = max([most, *points])
        _line(axes, points, color=colour, marker=marker, label=shape)
        chosen = [row for row in rows if row.variant == Variant("auto", shape)]
        x, y = _mean(chosen, mean_rows), _mean(chosen, value)
        if x is not None and y is not None:
            most = max(most, x)
            label = f"{Variant('auto', shape)}: {y:.4g}"
            axes.plot([x], [y], color=colour, marker="*", markersize=14, linestyle="", label=label)
    axes.set_xlabel("rows checked in a round (drafted nodes + 1)")
    axes.set_xscale("log", base=2)
    ticks = [n for n in _WIDTH_TICKS if n <= most]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.9, 1.2 * most)
    axes.margins(y=0.12)  # a marker at the top is whole


def _server_by_drafts(
    axes: Axes, report: LabReport, value: Callable[[ServerRow], float | None]
) -> None:
    rows = _first_server_rows(report)
    points = {
        1.0 + n_drafts: _mean([row for row in rows if row.n_drafts == n_drafts], value)
        for n_drafts in sorted({row.n_drafts for row in rows if row.n_drafts})
    }
    _line(axes, points, color=_ORANGE, marker="D", label="llama-server, drafted")


def _line(axes: Axes, points: Mapping[float, float | None], **style: Any) -> None:
    known = {x: y for x, y in points.items() if y is not None}
    if known:
        axes.plot(list(known), list(known.values()), linewidth=2, **style)


def _shown_rows(row: SpeedRow) -> float | None:
    return None if row.shown.nodes is None else 1 + row.shown.nodes


def _first_rows(report: LabReport) -> list[SpeedRow]:
    """Those of the first temperature from empty caches; of short prompts, if there are any."""
    rows = [r for r in report.rows if r.cache == "cold" and r.temperature == report.temperatures[0]]
    return [row for row in rows if row.category not in report.long_categories] or rows


def _first_server_rows(report: LabReport) -> list[ServerRow]:
    ours = {(row.category, row.temperature) for row in _first_rows(report)}
    rows = [row for row in report.server if row.concurrency == 1]
    return [row for row in rows if (row.category, row.temperature) in ours]


def _mean(rows: list[Row], value: Callable[[Row], float | None]) -> float | None:
    """Of the values that there are."""
    found = [each for row in rows if (each := value(row)) is not None]
    return fmean(found) if found else None


# Of the main variants


def accepted_lengths(axes: Axes, report: LabReport) -> None:
    """Share of the rounds by the tokens that they emitted: a bar for each temperature and shape."""
    axes.set_title("Rounds by their tokens")
    found = {pair: report.acceptance(*pair) for pair in _series(report)}
    found = {pair: acceptance for pair, acceptance in found.items() if acceptance.lengths}
    longest = max(max(acceptance.lengths) for acceptance in found.values())
    width = 0.84 / len(found)
    for i, (pair, acceptance) in enumerate(found.items()):
        lengths, total = acceptance.lengths, acceptance.n_rounds
        places = [length - 0.42 + (i + 0.5) * width for length in range(1, longest + 1)]
        shares = [100 * lengths.get(n, 0) / total for n in range(1, longest + 1)]
        label = f"{_named(report, *pair)}: {acceptance.mean_length or 0:.2f} on average"
        axes.bar(places, shares, width * 0.94, color=_COLOURS[i % 6], label=label)
    axes.set_xlabel("tokens per round (accepted drafts + 1)")
    axes.set_ylabel("share of rounds, %")
    step = 1 if longest <= 16 else 4 if longest <= 32 else 8  # more numbers run into each other
    axes.set_xticks([n for n in range(1, longest + 1) if n == 1 or n % step == 0])
    axes.grid(axis="x", visible=False)
    forced = any(report.is_forced(*pair) for pair in found)
    note = "of a few answers that\ndrafted whole blocks" if forced else None
    axes.set_ylim(0, (1.1 + 0.1 * (len(found) + 2 * forced)) * axes.get_ylim()[1])
    axes.legend(loc="upper right", title=note, alignment="left")


def _cost_curve(axes: Axes, report: LabReport) -> None:
    """Milliseconds of a pass of the target by its rows, against as many passes of one row."""
    axes.set_title("What the target's pass costs")
    rows = list(report.curve)
    costs = [1000 * seconds for seconds in report.curve.values()]
    axes.plot(rows, costs, color=_BLUE, marker="o", markersize=5, linewidth=2)
    axes.set_xlabel("rows checked in one pass")
    axes.set_ylabel("milliseconds")
    top = 1.25 * max(costs)
    if rows[0] == 1:
        end = min(rows[-1], top / costs[0])
        axes.plot([1, end], [costs[0], costs[0] * end], color=_QUIET, linestyle=_DASHED)
        # Beside the line's upper end, on the side where there is room.
        at = 1 + 0.82 * (end - 1)
        axes.annotate(
            "one by one",
            (at, costs[0] * at),
            xytext=(7, -3),
            textcoords="offset points",
            va="top",
            color=_QUIET,
        )
    axes.set_ylim(0, top)
    axes.set_xlim(0.5, rows[-1] + 0.8)
    axes.set_xticks([n for n in rows if n in (1, 4, 8, 16, 24, 32, 48, 64)])


def _ratios(axes: Axes, report: LabReport) -> None:
    """Drafted over plain tokens/s by category: medians, and bars from quartile to quartile."""
    axes.set_title("Speed against plain decoding")
    found = [(row, row.ratio) for row in report.main_rows if row.ratio]
    categories = list(dict.fromkeys(row.category for row, _ in found))
    series = _series(report)
    for i, pair in enumerate(series):
        shift = min(0.3, 0.8 / len(series)) * (i - (len(series) - 1) / 2)
        own = [
            (categories.index(row.category) + shift, ratio)
            for row, ratio in found
            if (row.temperature, row.variant) == pair
        ]
        axes.errorbar(
            [ratio.median for _, ratio in own],
            [place for place, _ in own],
            xerr=[
                [ratio.median - ratio.low for _, ratio in own],
                [ratio.high - ratio.median for _, ratio in own],
            ],
            fmt=_MARKERS[i % 6],
            color=_COLOURS[i % 6],
            markersize=7,
            elinewidth=2,
            label=_named(report, *pair),
        )
        for place, ratio in own:
            axes.annotate(
                f"{ratio.median:.2f}",
                (ratio.high, place),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=_INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9},
            )
    axes.axvline(1, color=_INK, linewidth=1)
    _by_category(axes, categories, 1.3 * max(1.1, *(ratio.high for _, ratio in found)))
    axes.set_xlabel("drafted over plain, tokens/s (1 = plain decoding)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=min(2, len(series)))


def _plain_speeds(axes: Axes, report: LabReport) -> None:
    """Tokens/s of plain decoding by category: medians, a bar for each temperature."""
    axes.set_title("Speed of plain decoding")
    rows = [(row, row.plain.median) for row in report.main_rows if row.plain.median]
    categories = list(dict.fromkeys(row.category for row, _ in rows))
    width = 0.8 / len(report.temperatures)
    for i, temperature in enumerate(report.temperatures):
        own = [(row, median) for row, median in rows if row.temperature == temperature]
        places = [categories.index(row.category) - 0.4 + (i + 0.5) * width for row, _ in own]
        bars = axes.barh(
            places,
            [median for _, median in own],
            width * 0.94,
            color=_COLOURS[i % 6],
            label=f"temperature {temperature:g}",
        )
        axes.bar_label(bars, fmt="%.4g", padding=4, fontsize=9, color=_INK)
    _by_category(axes, categories, 1.2 * max(median for _, median in rows))
    axes.set_xlabel("tokens/s")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2)


def _by_category(axes: Axes, categories: list[str], most: float) -> None:
    """A row for each category, the first at the top, for values up to `most`."""
    axes.set_yticks(range(len(categories)), [_NAMES.get(name, name) for name in categories])
    axes.set_ylim(len(categories) - 0.5, -0.5)
    axes.set_xlim(0, most)
    axes.grid(axis="y", visible=False)


def _series(report: LabReport) -> list[tuple[float, Variant]]:
    return [(t, variant) for t in report.temperatures for variant in report.main_variants]


def _named(report: LabReport, temperature: float, variant: Variant) -> str:
    text = f"temperature {temperature:g}"
    return text if len(report.main_variants) == 1 else f"{text}, {variant}"


def _nothing(axes: Axes, _report: LabReport) -> None:
    axes.set_axis_off()
    axes.text(0, 0.9, _NO_DRAFTS, transform=axes.transAxes, color=_QUIET)
