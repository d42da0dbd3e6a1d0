"""Cases that have each pair of values together at least once (pairwise testing, Cohen et al. 1997,
"The AETG System"): most faults need no more than two things at once."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise_cases(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each of `factors`, few of all. The same at each call."""

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        return set(combinations(enumerate(case), 2))

    everything = list(product(*(range(len(factor)) for factor in factors)))
    left = set().union(*map(pairs, everything))
    cases = []
    while left:
        best = max(everything, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        cases.append(tuple(factor[i] for factor, i in zip(factors, best, strict=True)))
    return cases
