"""The best width by the costs of a machine, and its gain, by accepted length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from dflash_local.controller.costs import Costs

LENGTHS = (3.0, 4.5, 6.5)
"""Accepted lengths of a drafter on prose, on most tasks, and on code or mathematics."""


@dataclass(frozen=True)
class Outlook:
    """The best that drafting makes of an accepted length, the tokens a round of whole blocks.

    `width` counts target rows with the anchor and is at least 2. `gain` is the speed over that of
    plain decoding, and may be less than 1.
    """

    accepted_length: float
    width: int
    gain: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "accepted_length": self.accepted_length,
            "width": self.width,
            "gain": round(self.gain, 3),
        }


def outlooks(costs: Costs, block_size: int) -> list[Outlook]:
    """For one sequence at the least depth measured: one for each length that a block can give, or
    else for a whole block.

    Draft j is accepted with probability p^j, with p such that whole blocks give that length.
    """
    n_drafts, depth = block_size - 1, costs.depths[0]
    plain_s = costs.step_s(1, depth) + costs.host_s

    def round_s(n: int) -> float:
        draft_s = costs.draft_s(1, depth, n_drafts - n) + costs.draft_host_s
        return draft_s + costs.step_s(1 + n, depth) + costs.host_s

    found = []
    for length in [each for each in LENGTHS if each <= block_size] or [float(block_size)]:
        survival = _survival(length, n_drafts)
        gains = {
            1 + n: tokens * plain_s / round_s(n)
            for n, tokens in enumerate(accumulate(survival, initial=1.0))
            if n
        }
        width = max(gains, key=gains.__getitem__)
        found.append(Outlook(length, width, gains[width]))
    return found


def _survival(length: float, n_drafts: int) -> list[float]:
    """p^j for each draft j, 1..n: these and the target's own token add up to `length`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        mean = math.fsum(p**j for j in range(n_drafts + 1))
        low, high = (p, high) if mean < length else (low, p)
    return [high**j for j in range(1, n_drafts + 1)]


def outlook_line(found: Sequence[Outlook]) -> str:
    """One line: at which accepted lengths drafting pays, and at which it does not."""
    texts = []
    for pays in (True, False):
        some = [each for each in found if (each.gain > 1) == pays]
        if some:
            lengths = ", ".join(f"{each.accepted_length:g}" for each in some)
            gains = ", ".join(f"{each.gain:.2f}" for each in some)
            widths = ", ".join(str(each.width) for each in some)
            texts.append(
                f"at {lengths} tokens per round drafting pays with width {widths}: "
                f"{gains} times plain decoding"
                if pays
                else f"at {lengths} tokens per round drafting does not pay: at most {gains} "
                "times plain decoding"
            )
    return "; ".join(texts)
