"""`dflash-local list`: the pairs that have a name, and what of them is here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from .answer import stdout_columns, write_stdout
from .options import JSON, Option, SectionedCommand
from .report import table

if TYPE_CHECKING:
    from dflash_local.pairs.inventory import Place, Stock

SECTIONS = {
    "Output": (
        Option("--here", "here_only", is_flag=True, help="Only what is on this disk."),
        JSON,
    ),
}
_PLACES = {"gpu": "on the GPU", "cpu": "on the CPU", "no": "no", None: "?"}


@click.command("list", cls=SectionedCommand, sections=SECTIONS)
def list_models(here_only: bool, as_json: bool) -> None:
    """List the models that have a name, and what of them is here.

    It also says what fits this machine. The hub is not asked. Sizes with ~ are estimated from the
    number of weights, for Q4_K_M; `show NAME` asks for the real ones, and plans the memory.
    """
    from dflash_local.llama import runtime
    from dflash_local.pairs.inventory import stock

    devices = runtime.devices()
    found = [(each, each.place(devices)) for each in stock() if each.here or not here_only]
    if as_json:
        write_stdout(json.dumps({"models": [_fields(each, place) for each, place in found]}) + "\n")
        return
    if not found:
        click.echo("none of them is on this disk: `dflash-local pull NAME` fetches one", err=True)
    rows = [
        (each.entry.name, each.entry.target, _size(each), _here(each), _PLACES[place])
        for each, place in found
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


def _stacked(row: tuple[Stock, Place | None]) -> str:
    """For a terminal without room for a table."""
    stock, place = row
    fits = {"no": "does not fit", None: "may fit or not"}.get(place, _PLACES[place])
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


def _fields(stock: Stock, place: Place | None) -> dict[str, Any]:
    entry = stock.entry
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "target": entry.target,
        "gguf": entry.gguf,
        "drafter": entry.drafter,
        "here": stock.here,
        "drafter_here": stock.drafter_here,
        "n_bytes": stock.n_bytes,
        "is_estimate": stock.is_estimate,
        "fits": place,
    }
