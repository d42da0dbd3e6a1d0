"""Whether to draft, and how many rows to verify: what gives most tokens a second on this machine.

A policy over numbers. It knows the costs of this machine and, for every sequence, the chance that
each draft is accepted. All sequences of a batch share the rows of one target pass, so they are
judged together. It has no clock and no randomness: the same measurements give the same decisions.

A *plan*, made every few rounds, compares plain decoding with drafting for the best few sequences
(`Forecast`). Rounds then choose their rows by it (`RowChoice`). The `Budget` pays for *probes*,
which draft only to see whether it pays, and ends drafting that loses more than the forecast says.

What a text repeats can be *copied*: such drafts cost no time before they are verified, and how sure
they are is known. So they need no plan. In a round in which nobody drafts, those rows are verified
that pay; a drafter is left out of a round in which a copy is so sure that a draft adds too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Draft
from dflash_local.draft.shape import Chain, Shape, ShapeName
from dflash_local.pays.again import Again
from dflash_local.pays.budget import Budget
from dflash_local.pays.costs import Costs, PassTimes
from dflash_local.pays.forecast import Forecast
from dflash_local.pays.policy import PROBED, Findings, Policy
from dflash_local.pays.row_choice import HORIZON, RowChoice, SteadyRowChoice
from dflash_local.pays.survival import Prior

__all__ = ["Controller", "Policy"]

_ANSWER = 40
"""Rounds in which the way to drafting and back must be earned. Without this price, drafting
begins and ends by turns."""
_REPLAN = 8
"""Rounds between plans: they take host time, up to a tenth of a tiny model's step."""
_EARLY_ROUNDS, _KNOWN_ROUNDS = 4, 16
"""A request's first rounds, and a drafter's, in which seeing the outcome of a few drafts is worth
more than what they bring. Without these rounds, a good drafter whose confidence says nothing is
never found to be good."""
_FIRST_PROBE = 5.0
"""Plain rounds that a round of a drafter's very first probe may cost. Without this
gift, several sequences of a tiny model never try a drafter that would pay, as the probe costs more
than the budget has."""
_LATEST_LOOK = 1000
"""Rounds after which drafting is tried once in any case, at the latest with the next request.
Without this look, costs that were measured on a busy machine, many times too dear, keep drafting
off for good. A look of thirty plain rounds is then three in a hundred, once."""
_LONGEST_TIME = 4.0
"""A round counts as no longer than this many times what it should take. Without this limit, one
hiccup of the machine ends drafting that pays, or all probes of a process: 4 % on machines with
many."""
_CHECK_SHARE = 0.002
"""Of the time of drafting, what looking again at plain decoding may cost. Without these
looks, a calibration that found plain decoding too slow is never corrected."""
_COPY_MARGIN = 1.5
"""What rows of copies must bring for each plain row that they cost. With 1, a text that repeats
nothing pays for guesses that only just break even, two or three in a hundred."""
_FOREVER = 1 << 30


class Controller:
    """Decides for all sequences of one engine. In each round: `n_drafts`, and `without_sure` where
    there are copies; after the draft its `chances`, and by them, once copies have joined, the
    `rows`; `observe` for each draft that was verified; `observe_round`. Where nobody drafts,
    `least_copied` says which copies are worth a look."""

    def __init__(
        self,
        costs: Costs,
        block_size: int,
        prior: Prior | None = None,
        sampled: Prior | None = None,
        n_nodes: int = 0,
        n_copied: int = 0,
        *,
        equal_rows: bool = False,
    ) -> None:
        """`block_size` rows with the anchor are the most that a sequence verifies of a drafter's
        chain, 1 without a drafter; `n_nodes` those of a tree without it, and `n_copied` those of
        a copy; 0 where there are none. `equal_rows`: all sequences of a pass get as many rows."""
        self.costs = costs
        cold = partial(Prior, block_size, n_nodes)
        self.again = Again(costs)
        """The rows that its rounds decode again."""
        self.priors = {True: prior or cold(), False: sampled or cold()}
        """By whether the request is greedy: a draw hits the likeliest draft less often."""
        self.prior = self.priors[True]  # of the request that began last
        self.n_nodes = n_nodes
        self._n_draft = block_size - 1
        most = max(block_size - 1, n_nodes, n_copied)
        self._forecast = Forecast(costs, most, equal_rows=equal_rows)
        self._row_choice = SteadyRowChoice(equal=equal_rows)
        self._copy_choice = RowChoice(equal=equal_rows)
        self._gain = 1.0  # of drafting, while it is on
        self._passes = PassTimes(costs)
        self._budget = Budget()
        self._untried = True  # no probe was made in this process yet
        self._round = 0
        self._depth = 0
        # The plan in force
        self._idle = 0
        self._planned_at = self._replan_at = 0
        self._members: list[Policy] = []
        self._is_on = False  # not only for a probe
        self._probing = False
        self._unseen = True  # no draft was verified yet
        self._overdue = self._glances = False  # the probe in progress
        self._shape: ShapeName = "chain"
        self._doubt = 0.0
        self._least = 1  # nodes that a draft must be allowed
        # The rounds since
        self._plain_at = 0
        self._accepted = 0
        self._n_resting = 0  # rows to inject because their sequences have not drafted

    def open(
        self, depth: int = 0, *, greedy: bool = True, shapes: Sequence[Shape] | None = None
    ) -> Policy:
        """A request begins, after `depth` tokens in all caches, whose drafts may have these shapes:
        chains alone if there are none."""
        if depth:
            self._depth = depth
        self.prior = self.priors[greedy]
        if len(self._members) <= 1:
            self._budget.renew()
        policy = Policy(self.prior, shapes or [Chain(self._n_draft)], self._round)
        policy.has_drafter = self._n_draft > 0
        return policy

    @property
    def idle(self) -> int:
        """Rounds that are plain whatever is asked."""
        return self._idle

    @property
    def _drafting(self) -> bool:
        return self._is_on or self._probing

    @property
    def hopeful(self) -> bool:
        """Whether a request that begins now may well draft, as far as is known."""
        return self._drafting or self.prior.rounds < _KNOWN_ROUNDS

    def most_again(self, n_seqs: int) -> float:
        """Rows of each of `n_seqs` sequences beyond which not to draft, so that none are left to be
        decoded again."""
        draft_s = self.costs.host_s
        if self._drafting:
            draft_s += self.costs.draft_s(n_seqs, self._depth) + self.costs.draft_host_s
        return self.again.most(n_seqs, self._depth, draft_s) / n_seqs

    def skip(self, n_rounds: int) -> None:
        """So many plain rounds were made without asking, at most `idle`."""
        self._idle -= n_rounds
        self._round += n_rounds
        self._passes.skip(n_rounds)

    def n_drafts(
        self, policies: Sequence[Policy], limits: Sequence[int], other_rows: int = 0
    ) -> list[int]:
        """How many tokens to draft for each sequence; 0: do without the drafter this round.

        `limits` are the most drafts that make sense for each, by the end of its answer and the room
        in the context. `other_rows` are rows of sequences in the same pass that have no policy.
        """
        self._round += 1
        n = len(policies)
        same = n + other_rows == self._forecast.base and list(policies) == self._members
        if same and self._idle > 0:
            self._idle -= 1
            return [0] * n
        if not same or self._round >= self._replan_at:
            self._plan(policies, other_rows)
            if not self._drafting or self._idle > 0:
                return [0] * n
        return [
            self._n_draft if (p.drafting or p.probing) and limit >= self._least else 0
            for p, limit in zip(policies, limits, strict=True)
        ]

    def without_sure(
        self, policies: Sequence[Policy], n_drafts: Sequence[int], copies: Sequence[list[float]]
    ) -> list[int]:
        """`n_drafts`, without those sequences whose copies, with these falling chances, are so sure
        that the drafter is not asked."""
        if self._probing:
            return list(n_drafts)
        n_drafting = sum(map(bool, n_drafts))
        return [
            0 if n and curve and self._does_without(policy, curve, n_drafting) else n
            for policy, n, curve in zip(policies, n_drafts, copies, strict=True)
        ]

    def _does_without(self, policy: Policy, copied: list[float], n_drafting: int) -> bool:
        """Whether a copy with these chances is verified by itself, and a draft would add less to it
        than its time is worth."""
        if self._copies().widths([copied], self._last_rows("chain"), self.costs.switch_s) == [1]:
            return False  # the round would be plain
        choice, costs = self._row_choice, self.costs
        both = list(map(max, zip_longest(copied, policy.typical(), fillvalue=0.0)))
        draft_s = costs.draft_s(n_drafting, self._depth) + costs.draft_host_s
        draft_s = (draft_s + costs.after_draft_s) / n_drafting
        if self._shape == "tree":  # the pass of a copy is that of a chain: there and back
            draft_s -= 2 * costs.switch_s / n_drafting
        return choice.value(both) - choice.value(copied) < draft_s * choice.rate

    def chances(
        self,
        policies: Sequence[Policy],
        drafts: Sequence[Draft],
        limits: Sequence[int],
    ) -> list[list[float]]:
        """The falling chances of what a drafter has drafted for each sequence, to be accepted;
        empty where it has not. Asked once in each round with drafts: it counts them."""
        chains: list[list[float]] = []
        for policy, draft, limit in zip(policies, drafts, limits, strict=True):
            if not draft or limit < 1:
                chains.append([])
                continue
            early = policy.probing or policy.rounds < _EARLY_ROUNDS
            unknown = early and self.prior.rounds < _KNOWN_ROUNDS and not self._glances
            chains.append(policy.chances(draft, limit, early=unknown))
            policy.rounds += 1
            self._n_resting += self._round - policy.rest_from
            policy.rest_from = self._round
        return chains

    def rows(
        self, chains: Sequence[list[float]], *, drafted: bool = True, joined: bool = False
    ) -> list[int]:
        """Rows to verify for each sequence, its anchor included: 1 verifies nothing.

        `chains` are the falling chances of the drafts, as `chances` has them, or of what they are
        once copies have `joined` them. `drafted`: the drafter had a part in the round; otherwise
        they are copies alone.
        """
        switch_s = self.costs.switch_s
        if not drafted:
            self._renew(len(chains))
            return self._copies().widths(chains, self._last_rows("chain"), switch_s)
        choose = self._row_choice.joined_widths if joined else self._row_choice.widths
        return self._drafted_rows(chains) or choose(chains, self._last_rows(self._shape), switch_s)

    def _drafted_rows(self, chains: Sequence[list[float]]) -> list[int]:
        """Rows of a probe, which knows no others before it; empty in other rounds."""
        if self._overdue:  # whatever it is thought to cost
            return [1 + min(PROBED, len(chain)) for chain in chains]
        if self._probing:
            budget = self._budget.amount
            return self._row_choice.probe_widths(chains, self.costs.switch_s, budget)
        return []

    def _last_rows(self, shape: ShapeName) -> int | None:
        """Those of the last pass, without as many as this round decodes again."""
        rows = self._passes.rows(shape)
        return rows if rows is None else rows - self.again.now

    def least_copied(self, n_seqs: int) -> NDArray[np.float64]:
        """How much of the first k + 1 tokens of a copy must be expected to be right, float64 by k,
        in a round in which none of `n_seqs` sequences drafts: else `rows` takes none of them."""
        self._renew(n_seqs)
        return self._copies().least(n_seqs, self._last_rows("chain"), self.costs.switch_s)

    def _renew(self, n_seqs: int) -> None:
        forecast = self._forecast
        forecast.renew(n_seqs, forecast.base - n_seqs, self._depth, self.again)

    def _copies(self) -> RowChoice:
        """Chooses rows where nobody drafts."""
        forecast = self._forecast
        rate = _COPY_MARGIN * forecast.base / forecast.plain_s * self._gain
        self._copy_choice.price(forecast.base, forecast.passes, rate)
        return self._copy_choice

    def observe(self, policy: Policy, draft: Draft, tokens: Sequence[int]) -> None:
        """What became of a draft: the tokens emitted after its anchor, the last the target's own.

        Not needed where nothing was verified.
        """
        self._accepted += len(tokens) - 1
        if draft.candidates is not None or not all(draft.copied):
            policy.observe(draft, tokens)

    def observe_round(
        self,
        n_rows: int,
        shape: ShapeName,
        n_drafting: int,
        depth: int,
        draft_s: float,
        verify_s: float,
        host_s: float | None = None,
        *,
        rebuilt: bool = False,
        n_injected: int = 0,
        inject_s: float = 0.0,
    ) -> None:
        """The times of a round: rows of its target pass and their shape, sequences that drafted,
        cached tokens.

        `host_s` is the rest of the round, where the caller knows it. `rebuilt`: llama.cpp has built
        its graph again, whether the row count is another or not. `n_injected` rows were injected
        for its drafts, in the draft stage or in `inject_s` before it. Not for rounds of which
        `n_drafts` was not asked, except plain ones.
        """
        costs, forecast, drafted = self.costs, self._forecast, n_drafting > 0
        base, n_new = forecast.base, n_rows - self.again.now
        verified = drafted or n_new > base
        changed = self._passes.rows(shape) != n_rows
        self._depth = depth
        if n_rows == base:
            self._plain_at = self._round
        self._passes.observe(n_rows, depth, verify_s, shape, drafted=drafted, rebuilt=rebuilt)
        self.again.observe(n_new, base + self._accepted, verified=verified, changed=changed)
        if host_s is not None and (drafted or not verified):
            costs.observe_host(drafted, host_s)
        if drafted:
            self._unseen = self._unseen and n_new <= base
            usual_s = costs.step_s(n_rows, depth, shape) + costs.after_draft_s
            if self._passes.fresh and not self._probing and not self.again.usual:
                # Graphs are made once, and say nothing of the drafter's worth.
                verify_s = min(verify_s, usual_s)
            if self._probing:
                costs.bound_draft(n_drafting, depth, draft_s)
                costs.bound_injection(n_injected, inject_s + draft_s)
            else:
                costs.observe_draft(n_drafting, depth, draft_s)  # a probe has many rows to inject
            if inject_s:  # drafting pays for its rests, not for prompts
                inject_s *= min(self._n_resting / n_injected, 1.0)
            usual_host_s = costs.host_s + costs.draft_host_s
            seconds = inject_s + draft_s + verify_s + (usual_host_s if host_s is None else host_s)
            usual_s += usual_host_s + costs.draft_s(n_drafting, depth) + costs.switch_s
            self._settle(min(seconds, _LONGEST_TIME * usual_s))
        elif self._drafting and not verified and self.again.now and base:
            # What drafts have left to do is theirs to pay.
            seconds = costs.step_s(n_rows, depth) + costs.host_s + changed * costs.switch_s
            self._budget.settle(1 - seconds / forecast.plain_s, self._round, forecast.way)
        self._accepted = self._n_resting = 0

    def _settle(self, seconds: float) -> None:
        """After a round that drafted: how far it was ahead of plain decoding."""
        forecast = self._forecast
        gained = 1 + self._accepted / forecast.base - seconds / forecast.plain_s
        if self._probing:
            self._budget.settle_probe(gained)
        else:
            if self.prior.rounds < _KNOWN_ROUNDS:
                self._budget.settle_unknown(gained)
            self._budget.settle(gained, self._round, forecast.way)
            if self._round < self._budget.suspended_until:
                self._replan_at = 0

    # The plan

    def _plan(self, policies: Sequence[Policy], other_rows: int) -> None:
        self._overdue = self._glances = False
        now, forecast = self._round, self._forecast
        self._budget.earn(now)
        n_rounds, self._planned_at = now - self._planned_at, now
        forecast.renew(len(policies), other_rows, self._depth, self.again)
        self._members = list(policies)
        able = [policy for policy in policies if not policy.off] if self._n_draft else []
        on, findings = self._best(able) if able else ([], None)
        suspended = self._budget.suspended_until - now
        if findings and suspended > 0:
            findings = replace(findings, suspended=True)
        if findings and (suspended > 0 or not self._pays(findings.gain, n_rounds)):
            on = []
        self._least = findings.shortest if findings else 1
        self._gain = findings.gain if findings and on else 1.0
        rate = forecast.base / forecast.plain_s * self._gain
        self._row_choice.price(forecast.base, forecast.passes, rate, self._shape)
        for policy in able:
            policy.drafting, policy.probing, policy.findings = policy in on, False, findings
        resting = [policy for policy in able if not policy.drafting]
        wait = suspended if suspended > 0 else self._probe(resting, len(on))
        if on and not self._is_on:
            self._budget.begin()
        elif self._is_on and not on:
            self._budget.end()
        self._is_on, self._probing = bool(on), wait == 0 and not on
        self._idle = 0
        if not self._drafting:
            self._idle, self._replan_at = wait - 1, 0
            return
        if on and findings and self._forgets_plain(findings):
            self._idle = 2
        early = any(policy.rounds < _EARLY_ROUNDS for policy in on)
        steps = 1 if early or wait == 0 else _REPLAN
        if self._probing and not self._glances:
            steps = forecast.probe_rounds
        self._replan_at = now + self._idle + min(steps, wait or steps)

    def _best(self, able: Sequence[Policy]) -> tuple[list[Policy], Findings]:
        """The best that drafting can do, in each shape that is open: in the last one, unless the
        other has more of a lead than going there costs."""
        found: dict[ShapeName, tuple[list[Policy], Findings]] = {}
        for name in sorted({name for policy in able for name in policy.shapes}):
            for policy in able:
                policy.take(name)
            found[name] = self._forecast.best(able)
        gains = {name: findings.gain for name, (_, findings) in found.items()}
        if self._shape in gains:
            gains[self._shape] *= 1 + self._forecast.switch / HORIZON
        self._shape = max(gains, key=gains.__getitem__)
        for policy in able:
            policy.take(self._shape)
        return found[self._shape]

    def _forgets_plain(self, findings: Findings) -> bool:
        """Whether to decode plainly for a moment: drafting would never find out that plain decoding
        has become faster than it was measured."""
        loss = 2 * (findings.gain - 1) + self._forecast.way
        a_round = findings.tokens / self._forecast.base / findings.gain
        return (self._round - self._plain_at) * a_round * _CHECK_SHARE > loss

    def _pays(self, gain: float, n_rounds: int) -> bool:
        """Whether to draft, where `gain` times the speed of plain decoding is expected, `n_rounds`
        after the last plan."""
        way = self._forecast.way
        if not self._is_on:
            self._doubt = 0.0
            return gain >= 1 + way * self._budget.caution / _ANSWER
        # A few drafts tell little: what is lost in all rounds together must be worth the way.
        self._doubt = max(self._doubt + n_rounds * (1 - gain), 0.0)
        return self._doubt <= way

    def _probe(self, due: list[Policy], n_on: int) -> int:
        """Let those that rest draft to see whether it pays, if the budget allows; rounds to wait if
        not."""
        forecast, budget, now = self._forecast, self._budget, self._round
        if not due:
            return _FOREVER
        loss = forecast.probe_loss(due, n_on, now)
        glances = not n_on and not self._unseen and loss > budget.amount
        loss = forecast.glance_loss(due, now) if glances else loss
        first = self._untried and self.prior.rounds == 0
        first = first and loss <= _FIRST_PROBE * forecast.probe_rounds
        overdue = self._unseen and now >= _LATEST_LOOK
        if loss > budget.amount and not first and not overdue:
            wait = budget.wait(loss, forecast.upkeep(len(due)))
            if wait is None:
                for policy in due:
                    policy.off = True
            elif self._unseen:
                wait = min(wait, _LATEST_LOOK - now)
            return wait or _FOREVER
        self._untried, self._overdue, self._glances = False, overdue, glances
        for policy in due:
            policy.probing = True
            policy.survival.rest(now - policy.rest_from)
        if n_on:  # only a round of its own shows what it has really cost
            budget.amount -= loss
        return 0
