"""`dflash-local list`: the pairs that have a name, and what of them is here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from .answer import stdout_columns, write_json, write_report, write_stdout
from .options import JSON, Option, SectionedCommand
from .report import table

if TYPE_CHECKING:
    from dflash_local.pairs.inventory import Stock

SECTIONS = {
    "Output": (
        Option("--here here_only", "Only what is on this disk."),
        Option("--all show_all", "Further drafters of one model, too."),
        JSON,
    )
}
_PLACES = {
    "gpu": "on the GPU",
    "experts": "with experts in RAM",
    "cpu": "on the CPU",
    "no": "no",
    None: "?",
}


@click.command("list", cls=SectionedCommand, sections=SECTIONS)
def list_models(here_only: bool, show_all: bool, as_json: bool) -> None:
    """List the models that have a name, and what of them is here.

    First comes the best one for this machine. It also lists what ollama and LM Studio have on this
    disk: `run` takes their names. The hub is not asked. Sizes with ~ are estimated from the number
    of weights, for Q4_K_M; `show NAME` asks for the real ones, and plans the memory.
    """
    from dflash_local.llama import runtime
    from dflash_local.pairs import inventory

    devices = runtime.devices()
    every = inventory.listed(devices)
    best = inventory.best(every)
    found = [stock for stock in every if stock.here or not here_only]
    others = inventory.others(devices)
    if as_json:
        told = {
            "models": [stock.as_dict() for stock in found],
            "best": best[0] if best else None,
            "others": others,
        }
        write_json(told)
        return
    if best and not here_only:
        write_report(f"best for this machine: {best[0]}, {best[1]}\n\n")
    if not found and not others:
        click.echo("none of them is on this disk: `dflash-local pull NAME` fetches one", err=True)
    n_found = len(found)
    if not show_all:
        found = [stock for stock in found if not stock.is_further]
    _write_table(found)
    if others:
        rows = [(each["name"], gigabytes(each["n_bytes"]), each["store"]) for each in others]
        write_stdout(f"\n{table(rows, ('on this disk', 'size', 'of'))}\n")
    if any(stock.fits == "cpu" for stock in found):
        write_report("\non the CPU drafting will hardly pay; copies of the text may\n")
    if len(found) < n_found:
        left = n_found - len(found)
        write_report(f"{left} further drafters of these models: --all lists them\n")


def _write_table(found: Sequence[Stock]) -> None:
    if not found:
        return
    rows = [
        (each.entry.name, each.entry.target, _size(each), _here(each), _PLACES[each.fits])
        for each in found
    ]
    heads = ("name", "model", "size", "here", "fits")
    text = table(rows, heads) + "\n"
    columns = stdout_columns()
    if columns and _width(text) > columns:
        short = [(name, *rest) for name, _, *rest in (heads, *rows)]  # the name says the model
        text = table(short[1:], short[0]) + "\n"
    if columns and _width(text) > columns:
        text = "".join(map(_stacked, found))
    write_stdout(text)


def _stacked(stock: Stock) -> str:
    """For a terminal without room for a table."""
    fits = {"no": "does not fit", None: "may fit or not"}.get(stock.fits, _PLACES[stock.fits])
    here = _here(stock)
    parts = [_size(stock), f"here: {here}" if here else "not here", fits]
    return f"{stock.entry.name}\n  {', '.join(parts)}\n"


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def gigabytes(n_bytes: int) -> str:
    """A size as the hub shows it."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def _size(stock: Stock) -> str:
    if stock.n_bytes is None:
        return "?"
    return ("~" if stock.is_estimate else "") + gigabytes(stock.n_bytes)


def _here(stock: Stock) -> str:
    if not stock.here:
        return ""
    return ", ".join(stock.here) + ("" if stock.drafter_here else " without drafter")
