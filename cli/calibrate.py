"""`dflash-local calibrate`: measure again what drafting costs on this machine, and keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .answer import write_json, write_report
from .loading import check_drafter, check_files, load_model
from .options import FILES, LOADING, QUIET, Option, SectionedCommand
from .report import table
from .terminal import Speaker

if TYPE_CHECKING:
    from dflash_local.controller.costs import Costs
    from dflash_local.cuda.trial import EVERY_PASS, Finding

SECTIONS = {
    "Model": FILES,
    "Output": (
        Option("--json as_json", "Print one JSON object, in milliseconds."),
        QUIET,
    ),
    "Machine": LOADING,
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
def calibrate(**values: Any) -> None:
    """Measure again what drafting costs on this machine.

    The width of --draft-width auto depends on it. This happens by itself when a pair is first
    loaded. Do it again if other work disturbed the measurement, or if the machine has changed. It
    takes a few seconds, or as many as DFLASH_LOCAL_CALIBRATION_S says, and up to twice that if the
    times differ much. The result is kept for these files with these machine options, unless the
    machine was too busy. Where a target has heads and a drafter was found for it, it also measures
    again which of them is faster.
    """
    check_files(values)
    check_drafter(values, "calibrate measures what drafting costs")
    # With a width the drafter stays loaded, whatever the costs are.
    more: dict[str, Any] = {"recalibrate": True, "draft_width": 2}
    with load_model(values, Speaker(values["quiet"]), **more) as model:
        controller = model.engine.controller
        assert controller is not None
        costs = controller.costs
        few_rows = model.engine.target.few_rows
        products = few_rows.findings if few_rows else []
    if values["as_json"]:
        told = costs.as_dict()
        times = {name: value for name, value in told.items() if name.endswith("_s")}
        report = {f"{name.removesuffix('_s')}_ms": _scaled(value) for name, value in times.items()}
        report["spread"] = round(told["spread"], 4)
        report["products"] = [
            {**asdict(each), "shape": str(each.shape), "is_ours": each.is_ours} for each in products
        ]
        write_json(report)
    else:
        write_report("".join(f"{line}\n" for line in cost_lines(costs)))
        if products:
            write_report("\n" + product_table(products) + "\n")


def cost_lines(costs: Costs) -> list[str]:
    """In words and milliseconds, for the terminal."""
    known = costs.as_dict()
    drafts = next(iter(known["draft_s"].values()))
    return [
        *(
            f"target step after {depth} tokens, ms by rows: {_listed(steps)}"
            for depth, steps in known["step_s"].items()
        ),
        f"draft stage, ms by sequences: {_listed(drafts)}",
        f"another row count than the last: {1e3 * costs.switch_s:.3g} ms; "
        f"injecting a row: {1e3 * costs.inject_s:.3g} ms",
    ]


def product_table(products: Sequence[Finding]) -> str:
    """Microseconds of a product by our kernels and by llama.cpp's; which of the two is taken."""
    columns = sorted({n for finding in products for n in finding.ours_us})
    rows = [
        [
            str(finding.shape),
            *(f"{finding.ours_us[n]:.1f} / {finding.ggml_us[n]:.1f}" for n in columns),
            _taken(finding),
        ]
        for finding in products
        if finding.ours_us
    ]
    heads = ["µs by columns, ours / llama.cpp's", *map(str, columns), "taken"]
    return table(rows, heads)


def _taken(finding: Finding) -> str:
    left = finding.left
    if not left:
        return "ours"
    if left == EVERY_PASS:
        return "llama.cpp's"
    return f"ours beyond {left[-1]}" if left[0] == 1 else f"ours below {left[0]}"


def _listed(times: Mapping[str, float]) -> str:
    return ", ".join(f"{n}: {1e3 * seconds:.3g}" for n, seconds in times.items())


def _scaled(seconds: Any) -> Any:
    """In milliseconds, rounded to 0.1 microseconds."""
    if isinstance(seconds, Mapping):
        return {key: _scaled(value) for key, value in seconds.items()}
    return round(1e3 * seconds, 4)
