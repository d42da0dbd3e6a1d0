"""The models that have a name, in the order of a list: what is here, what fits, where to begin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_local.pairs.inventory import Place, Stock, place, stock
from dflash_local.pairs.stores import stored_models

if TYPE_CHECKING:
    from dflash_local.llama.runtime import Device


@dataclass(frozen=True)
class Row:
    """One pair, and where it would fit; None if its size is not known."""

    stock: Stock
    place: Place | None
    is_further: bool
    """Whether another drafter of the same model stands for it, and it is not here."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        stock, entry = self.stock, self.stock.entry
        files = ("here", "drafter_here", "n_bytes", "is_estimate")
        return {
            "name": entry.name,
            "aliases": list(entry.aliases),
            **{name: getattr(entry, name) for name in ("target", "gguf", "drafter")},
            **{name: getattr(stock, name) for name in files},
            "fits": self.place,
            "is_further": self.is_further,
        }


def rows(devices: Sequence[Device]) -> list[Row]:
    """All pairs of the registry by family, as qwen3 and gemma-4, then by size. The hub is not
    asked."""
    found = stock()
    shortest: dict[str, str] = {}
    for each in found:
        name, target = each.entry.name, each.entry.target
        shortest[target] = min(shortest.get(target, name), name, key=len)
    listed = [
        Row(
            each,
            each.place(devices),
            shortest[each.entry.target] != each.entry.name
            and not (each.here and each.drafter_here),
        )
        for each in found
    ]
    return sorted(listed, key=_family)


def _family(row: Row) -> tuple[str, float, str]:
    name = row.stock.entry.name
    family = re.match(r"[a-z]+-?[\d.]*", name)
    return (family[0] if family else name, float(row.stock.n_bytes or 1e15), name)


def best(listed: Sequence[Row]) -> tuple[str, str] | None:
    """The name of the model to begin with, and why."""
    sized = [
        (row.stock.n_bytes, row)
        for row in listed
        if row.stock.n_bytes and row.stock.entry.gguf and row.stock.entry.package is None
    ]  # one that comes with a package is for a first try
    on_gpu = [(n, row.stock.entry.name) for n, row in sized if row.place == "gpu"]
    if on_gpu:
        return max(on_gpu, key=lambda each: each[0])[1], "the largest that fits the GPU"
    on_cpu = [(n, row.stock.entry.name) for n, row in sized if row.place == "cpu"]
    if not on_cpu:
        return None
    why = "the smallest: without a GPU each token reads all weights"
    return min(on_cpu, key=lambda each: each[0])[1], why


def others(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """The models of ollama and LM Studio on this disk, for JSON."""
    return [
        {
            "name": each.name,
            "store": each.store,
            "n_bytes": each.n_bytes,
            "fits": place(each.n_bytes, devices),
        }
        for each in stored_models()
    ]
