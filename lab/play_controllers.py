"""Plays controllers on made-up machines and texts, and prints one table: tokens per second over the
best fixed width in hindsight, and over plain decoding.

    python -m lab.play_controllers [--kept-out] [--machine NAME ...] [--text NAME ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

import drafted_text
import machines
from dflash_local.controller.controller import Controller
from dflash_local.draft.shape import DraftShape
from drafted_text import BLOCK
from lab.rival import Rival
from machines import MACHINES, Machine
from rounds import N_NODES, Fixed, play

SEEDS = range(3)
LENGTHS = [200, 400, 150, 600, 300]
CHAINS, TREES = (2, 3, 4, 6, 8, 9, 12, 16), (8, 9, 16, 24, 32, 64)
PLAYERS: dict[str, Callable[..., Any]] = {"rival": Rival, "controller": Controller}


@dataclass(frozen=True)
class Cell:
    machine: str
    text: str
    n_seqs: int
    shape: DraftShape

    def rate(self, made: Callable[[Machine, int], Any], seed: int) -> float:
        """Tokens a second of one session: answers of several lengths with a new controller."""
        machine, text = MACHINES[self.machine], drafted_text.text(self.text)
        lengths = LENGTHS * max(1, self.n_seqs // 2)
        played = play(
            machine, text, made(machine, seed), lengths,
            n_seqs=self.n_seqs, shape=self.shape, seed=seed,
        )  # fmt: skip
        return played.rate

    def mean(self, made: Callable[[Machine, int], Any]) -> float:
        return len(SEEDS) / sum(1 / self.rate(made, seed) for seed in SEEDS)

    def fixed(self) -> tuple[float, float, str]:
        """Of plain decoding and of the best fixed width, with its name."""
        plain = self.mean(lambda *_: Fixed(0))
        rates = {"plain": plain}
        for width in CHAINS:
            rates[f"{width}"] = self.mean(lambda *_, w=width: Fixed(w))
        for width in TREES if self.shape == "auto" else ():
            rates[f"tree {width}"] = self.mean(lambda *_, w=width: Fixed(w, "tree"))
        best = max(rates, key=rates.__getitem__)
        return plain, rates[best], best

    def chosen(self, name: str) -> float:
        n_nodes = N_NODES if self.shape == "auto" else 0
        kind = PLAYERS[name]

        return self.mean(lambda m, seed: kind(m.costs(self.n_seqs, seed), BLOCK, n_nodes=n_nodes))


def cells(names: list[str], texts: list[str]) -> Iterator[Cell]:
    for name in names:
        for n_seqs in (1, 2, 4, 8):
            for text in texts:
                yield Cell(name, text, n_seqs, "chain")
                if MACHINES[name].takes_trees and n_seqs in (1, 4):
                    yield Cell(name, text, n_seqs, "auto")


@cache
def _played(cell: Cell) -> tuple[float, float, str, dict[str, float]]:
    return *cell.fixed(), {name: cell.chosen(name) for name in PLAYERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", nargs="*", help="only these")
    parser.add_argument("--text", nargs="*", help="only these")
    parser.add_argument("--kept-out", action="store_true", help="those that nothing was tuned on")
    parser.add_argument("--worst", type=int, default=0, help="print only so many cells of each")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    kept = arguments.kept_out
    names = arguments.machine or [n for n in MACHINES if (n in machines.KEPT_OUT) == kept]
    texts = arguments.text or list(drafted_text.KEPT_OUT if kept else drafted_text.TEXTS)
    all_cells = list(cells(names, texts))
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = dict(zip(all_cells, pool.map(_played, all_cells, chunksize=4), strict=True))
    report(found, arguments.worst)


def report(found: dict[Cell, tuple[float, float, str, dict[str, float]]], worst: int) -> None:
    players = list(next(iter(found.values()))[3])
    print("| machine | sequences, shape | text | best | " + " | ".join(players) + " |")
    print("|---" * (4 + len(players)) + "|")
    shown = list(found)
    if worst:
        lows = [
            sorted(found, key=lambda c, p=p: found[c][3][p] / found[c][1])[:worst] for p in players
        ]
        shown = [cell for cell in found if any(cell in low for low in lows)]
    for cell in shown:
        plain, best, name, rates = found[cell]
        told = [f"{rate / best:.3f}, {rate / plain:.2f}" for rate in rates.values()]
        where = f"{cell.machine} | {cell.n_seqs}, {cell.shape} | {cell.text}"
        print(f"| {where} | {name}: {best / plain:.2f} | {' | '.join(told)} |")
    print("\nover the best fixed width: mean, share of cells below 0.97, least; over plain: least")
    for by in ("all", *dict.fromkeys(cell.machine for cell in found)):
        some = [cell for cell in found if by in ("all", cell.machine)]
        told = []
        for player in players:
            over = [found[cell][3][player] / found[cell][1] for cell in some]
            plain = min(found[cell][3][player] / found[cell][0] for cell in some)
            low = sum(each < 0.97 for each in over) / len(over)
            told.append(
                f"{player} {sum(over) / len(over):.3f} {low:4.0%} {min(over):.3f} {plain:.3f}"
            )
        print(f"{by:18} {len(some):4} cells  " + "   ".join(told))


if __name__ == "__main__":
    main()
