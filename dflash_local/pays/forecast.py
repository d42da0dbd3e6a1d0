"""What drafting for a batch would cost and bring, before it is done: estimates, no decisions.

From the costs of this machine and the chances of every sequence's drafts. The chance to
survive falls along a chain, so the best k drafts of all sequences are a prefix of each chain. Costs
are looked up for every k, because they do not always rise with k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from dflash_local.pays.again import Again
from dflash_local.pays.costs import SIZES, Costs
from dflash_local.pays.policy import PROBED, Findings, Policy
from dflash_local.pays.row_choice import merged

_REFRESH = 32
"""Observations, or eight times as many tokens, after which the table of passes is made again: it
takes host time."""
_CHEAP_CHANGE = 0.2
"""Of a plain pass: where a change of rows costs less, all row counts are chosen among. Without
this, a laptop loses one in a hundred, as the few counts lie far apart."""
_LONGEST_PROBE = 4
"""Rounds of a probe, at most. With 1, a device on which a change of rows is dear learns too little
from each change."""


class Forecast:
    """For the batch and the depth of the last `renew`."""

    def __init__(self, costs: Costs, n_draft: int, *, equal_rows: bool = False) -> None:
        """`n_draft` are the most drafts of a sequence. `equal_rows`: all sequences of a pass get as
        many rows."""
        self._equal_rows = equal_rows
        self._costs = costs
        self._n_draft = n_draft
        self._n_seqs = 0
        self._depth = 0
        self._table_depth = 0
        self._table_age = 0
        self._again = 0
        self.base = 0
        """Rows of a plain pass."""
        self.passes: list[float] = [0.0]
        """Seconds of a pass with k rows beyond those, the host's part included; infinite for row
        counts that are not chosen among."""

    @property
    def plain_s(self) -> float:
        return self.passes[0]

    @property
    def switch(self) -> float:
        """Plain rounds that a change of row count costs."""
        return self._costs.switch_s / self.passes[0]

    @property
    def way(self) -> float:
        """Plain rounds that going to drafting and back costs, or to plain decoding and back."""
        return 2 * self.switch

    @property
    def probe_rounds(self) -> int:
        """Rounds of a probe: more where going there costs more than being there."""
        return min(max(round(2 * self._costs.switch_s / self.passes[0]), 1), _LONGEST_PROBE)

    def renew(self, n_seqs: int, other_rows: int, depth: int, again: Again | None = None) -> None:
        """For so many sequences, after `depth` cached tokens; `other_rows` share their passes.
        `again`: what rounds with drafts decode again."""
        costs, base = self._costs, n_seqs + other_rows
        n_again = again.usual if again else 0
        self._depth = depth
        if (
            base == self.base
            and n_seqs == self._n_seqs
            and n_again == self._again
            and abs(depth - self._table_depth) <= 8 * _REFRESH
            and costs.n_observed - self._table_age < _REFRESH
        ):
            return
        self.base, self._n_seqs, self._again = base, n_seqs, n_again
        self._table_depth, self._table_age = depth, costs.n_observed
        is_cheap = costs.switch_s < _CHEAP_CHANGE * costs.step_s(base, depth)
        self.passes = [
            costs.step_s(base + k + (n_again if k else 0), depth) + costs.host_s
            if k == 0 or base > 1 or is_cheap or base + k in SIZES
            else math.inf
            for k in range(n_seqs * self._n_draft + 1)
        ]
        # No device is that much slower with fewer rows; such a time was taken while it was busy.
        self.passes[0] = min(self.passes[0], 1.1 * min(self.passes))
        if again and n_again:
            self.passes[1:] = [seconds + again.usual_s for seconds in self.passes[1:]]

    def best(self, policies: Sequence[Policy]) -> tuple[list[Policy], Findings]:
        """The sequences to draft for, and what it would bring: the best 1, 2, 4, ... or all."""
        costs, depth, passes, base = self._costs, self._depth, self.passes, self.base
        ranked = [(sum(curve), i, curve) for i, curve in enumerate(_typical(policies))]
        ranked.sort(key=lambda entry: (-entry[0], entry[1]))
        plain_s = passes[0]
        plain_rate = base / plain_s
        best: tuple[float, int, int, float] = (0.0, 0, 0, 1.0)
        size = shortest = 1
        while True:
            size = min(size, len(ranked))
            extra = costs.draft_s(size, depth) + costs.draft_host_s + costs.after_draft_s
            extra += max(costs.extra_s(policies[i].shape.name, depth) for _, i, _ in ranked[:size])
            curves = [curve for _, _, curve in ranked[:size]]
            chances = merged(curves, base if self._equal_rows else 0)
            tokens = list(accumulate(chances, initial=float(base)))
            rates = [got / (extra + spent) for got, spent in zip(tokens, passes, strict=False)]
            rate = max(rates)
            if rate > best[0]:
                k = rates.index(rate)
                best = (rate, size, k, tokens[k])
                if len(ranked) == 1:
                    shortest = next((j for j, r in enumerate(rates) if r > plain_rate), 1) or 1
            if size == len(ranked):
                break
            size *= 2
        rate, size, k, got = best
        findings = Findings(
            n_seqs=base,
            drafts=k,
            shortest=shortest,
            tokens=got,
            gain=rate / plain_rate,
            draft=costs.draft_s(size, depth) / plain_s,
            double=costs.step_s(2 * base, depth) / costs.step_s(base, depth),
        )
        return [policies[i] for _, i, _ in ranked[:size]], findings

    def probe_loss(self, due: Sequence[Policy], n_on: int, now: int) -> float:
        """Plain rounds that a probe of these is expected to lose, beside `n_on` that draft."""
        costs, depth, passes = self._costs, self._depth, self.passes
        extra = costs.draft_s(n_on + len(due), depth) - costs.draft_s(n_on, depth)
        extra += costs.inject_s * sum(now - policy.rest_from for policy in due)
        n_probed = min(PROBED, self._n_draft) * len(due)
        if self._equal_rows:
            n_probed = min(min(PROBED, self._n_draft) * self.base, len(passes) - 1)
        verify = costs.step_s(self.base + n_probed, depth) - costs.step_s(self.base, depth)
        verify += max(costs.extra_s(policy.shape.name, depth) for policy in due)
        if not n_on:
            verify += 2 * costs.switch_s + costs.draft_host_s
        hopes = sum(sum(curve[:PROBED]) for curve in _typical(due))
        loss = extra + max(verify - hopes * passes[0] / self.base, 0.0)
        if not n_on:  # the rounds after the first need no new graph
            loss += (self.probe_rounds - 1) * max(loss - 2 * costs.switch_s, 0.0)
        return loss / passes[0]

    def glance_loss(self, due: Sequence[Policy], now: int) -> float:
        """Plain rounds that a draft of these costs, of which nothing is verified."""
        costs = self._costs
        seconds = costs.draft_s(len(due), self._depth) + costs.draft_host_s
        seconds += costs.inject_s * sum(now - policy.rest_from for policy in due)
        return seconds / self.passes[0]

    def upkeep(self, n_seqs: int) -> float:
        """Plain rounds by which a probe of so many gets dearer with each round that it waits: the
        context to inject goes on growing."""
        return self._costs.inject_s * n_seqs / self.passes[0]


def _typical(policies: Sequence[Policy]) -> list[list[float]]:
    return [policy.typical() for policy in policies]
