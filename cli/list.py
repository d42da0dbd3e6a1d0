"""`dflash-local list`: the pairs that have a name, and what of them is here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .answer import stdout_columns, write_report, write_stdout
from .options import JSON, Option, SectionedCommand
from .report import table

if TYPE_CHECKING:
    from dflash_local.pairs.inventory import Place, Stock

SECTIONS = {
    "Output": (
        Option("--here", "here_only", is_flag=True, help="Only what is on this disk."),
        Option("--all", "show_all", is_flag=True, help="Further drafters of one model, too."),
        JSON,
    ),
}
_PLACES = {"gpu": "on the GPU", "cpu": "on the CPU", "no": "no", None: "?"}


@click.command("list", cls=SectionedCommand, sections=SECTIONS)
def list_models(here_only: bool, show_all: bool, as_json: bool) -> None:
    """List the models that have a name, and what of them is here.

    First comes the best one for this machine. It also lists what ollama and LM Studio have on this
    disk: `run` takes their names. The hub is not asked. Sizes with ~ are estimated from the number
    of weights, for Q4_K_M; `show NAME` asks for the real ones, and plans the memory.
    """
    from dflash_local.llama import runtime
    from dflash_local.pairs.inventory import stock
    from dflash_local.pairs.stores import stored_models

    devices = runtime.devices()
    every = [(each, each.place(devices)) for each in stock()]
    best = _best(every)
    found = sorted(
        ((each, place) for each, place in every if each.here or not here_only), key=_family
    )
    others = stored_models()
    if as_json:
        told: dict[str, Any] = {"models": [_fields(each, place) for each, place in found]}
        told["best"] = best[0] if best else None
        told["others"] = [
            {"name": each.name, "store": each.store, "n_bytes": each.n_bytes} for each in others
        ]
        write_stdout(json.dumps(told) + "\n")
        return
    if best and not here_only:
        write_report(f"best for this machine: {best[0]}, {best[1]}\n\n")
    if not found and not others:
        click.echo("none of them is on this disk: `dflash-local pull NAME` fetches one", err=True)
    n_found = len(found)
    if not show_all:
        found = _folded(found)
    _write_table(found)
    if others:
        rows = [(each.name, gigabytes(each.n_bytes), each.store) for each in others]
        write_stdout(f"\n{table(rows, ('on this disk', 'size', 'of'))}\n")
    if any(place == "cpu" for _, place in found):
        write_report("\non the CPU drafting will hardly pay; copies of the text may\n")
    if len(found) < n_found:
        left = n_found - len(found)
        write_report(f"{left} further drafters of these models: --all lists them\n")


def _best(found: Sequence[tuple[Stock, Place | None]]) -> tuple[str, str] | None:
    """The name of the model to begin with, and why."""
    sized = [(each.n_bytes, each, place) for each, place in found if each.n_bytes]
    on_gpu = [(n, each) for n, each, place in sized if place == "gpu"]
    if on_gpu:
        most = max(n for n, _ in on_gpu)
        return next(
            (each.entry.name, "the largest that fits the GPU") for n, each in on_gpu if n == most
        )
    on_cpu = [(n, each) for n, each, place in sized if place == "cpu"]
    if not on_cpu:
        return None
    least = min(n for n, _ in on_cpu)
    name = next(each.entry.name for n, each in on_cpu if n == least)
    return name, "the smallest: without a GPU each token reads all weights"


def _family(row: tuple[Stock, Place | None]) -> tuple[str, float, str]:
    """Sorts by family, as qwen3 and gemma-4, then by size."""
    stock, _ = row
    name = stock.entry.name
    family = re.match(r"[a-z]+-?[\d.]*", name)
    return (family[0] if family else name, float(stock.n_bytes or 1e15), name)


def _folded(
    found: Sequence[tuple[Stock, Place | None]],
) -> list[tuple[Stock, Place | None]]:
    """One row of each model: the first of its drafters, and those that are here."""
    firsts: dict[str, str] = {}
    for each, _ in found:
        name = each.entry.name
        firsts[each.entry.target] = min(firsts.get(each.entry.target, name), name, key=len)
    return [
        (each, place)
        for each, place in found
        if firsts[each.entry.target] == each.entry.name or (each.here and each.drafter_here)
    ]


def _write_table(found: Sequence[tuple[Stock, Place | None]]) -> None:
    if not found:
        return
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
