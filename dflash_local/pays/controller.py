"""Whether to draft, and how many rows to verify: what gives most tokens a second on this machine.

A policy over numbers. It knows the costs of this machine and, for every sequence, the chance that
each draft survives; all sequences of a batch share the rows of one target pass, so they are judged
together. It has no clock and no randomness: the same measurements give the same decisions.

Once in a while a *plan* compares plain decoding with drafting for the best few sequences
(`Forecast`), and fixes the rate of tokens that a second is worth. Rounds then choose their rows by
it (`RowChoice`), and the `Purse` pays for what is drafted only to see whether it would pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import is_

from dflash_local.draft.draft import Draft
from dflash_local.draft.shape import Chain, Shape, ShapeName
from dflash_local.pays.costs import Costs
from dflash_local.pays.forecast import GAIN_TO_BEGIN, Forecast
from dflash_local.pays.pass_times import PassTimes
from dflash_local.pays.policy import Findings, Policy
from dflash_local.pays.purse import Purse
from dflash_local.pays.row_choice import RowChoice
from dflash_local.pays.survival import Prior

__all__ = ["Controller", "Policy"]

_LONGEST_PAUSE = 4096
"""Rounds: an answer whose next probe is farther off has done with drafting for good."""
_FIRST_PAUSE, _BACKOFF = 16, 64
"""Rounds without drafting after an end of it, and the longest between probes that can be paid."""
_ANSWER = 100
"""Rounds of a usual answer."""
_PHASE = 25
"""Rounds of a text in which trees or chains stay the better ones."""
_DOUBT = 0.3
"""Loss, added up over plans, at which drafting ends."""
_REPLAN, _EARLY_ROUNDS = 8, 4
"""Rounds between plans, after a request's first ones."""
_KNOWN_ROUNDS = 16
"""Rounds by which the drafter's own confidence can be believed."""
_HICCUP = 1.5
_FIRST_LOOK = 5.0
"""Plain rounds that the first look at a drafter is worth."""
_CHECK_SHARE = 0.002
"""Of the time of drafting, what looking again at plain decoding may cost."""


class Controller:
    """Decides for all sequences of one engine. In each round: `n_drafts`; where any drafted,
    `widths`, and `observe` for each that did; `observe_round`."""

    def __init__(
        self,
        costs: Costs,
        block_size: int,
        prior: Prior | None = None,
        sampled: Prior | None = None,
        n_nodes: int = 0,
    ) -> None:
        """`block_size` rows with the anchor are the most that a sequence verifies of a chain,
        `n_nodes` those of a tree without it; 0 where there are none."""
        self.costs = costs
        cold = partial(Prior, block_size, n_nodes)
        self.priors = {True: prior or cold(), False: sampled or cold()}
        """By whether the request is greedy: a draw hits the likeliest draft less often."""
        self.prior = self.priors[True]  # of the request that began last
        self.n_nodes = n_nodes
        self._n_draft = block_size - 1
        self._forecast = Forecast(costs, max(block_size - 1, n_nodes))
        self._row_choice = RowChoice()
        self._passes = PassTimes(costs)
        self._purse = Purse()
        self._round = 0
        self._depth = 0
        # The plan in force
        self._idle = 0
        self._replan_at = 0
        self._members: list[Policy] = []
        self._drafting = False
        self._exploring = False
        self._shape: ShapeName = "chain"
        self._early = False
        self._planned_at = 0
        self._doubt = 0.0
        self._least = 1
        # The rounds since
        self._plain_at = 0
        self._untried = True
        self._accepted = 0

    def open(
        self, depth: int = 0, *, greedy: bool = True, shapes: Sequence[Shape] | None = None
    ) -> Policy:
        """A request begins, after `depth` tokens in all caches, whose drafts may have these shapes:
        chains alone if there are none."""
        if depth:
            self._depth = depth
        self.prior = self.priors[greedy]
        if len(self._members) <= 1:
            self._purse.forgive()
        return Policy(self.prior, shapes or [Chain(self._n_draft)], self._round)

    @property
    def idle(self) -> int:
        """Rounds for which nothing is to be asked: they are plain."""
        return self._idle

    @property
    def hopeful(self) -> bool:
        """Whether a request that begins now may well draft, as far as is known."""
        return self._drafting or self.prior.rounds < _KNOWN_ROUNDS

    def skip(self, n_rounds: int) -> None:
        """So many plain rounds were made without asking, at most `idle`."""
        self._idle -= n_rounds
        self._round += n_rounds
        self._passes.skip(n_rounds)

    def n_drafts(
        self, policies: Sequence[Policy], limits: Sequence[int], other_rows: int = 0
    ) -> list[int]:
        """How many tokens to draft for each sequence; 0: decode it plainly this round.

        `limits` are the most drafts that make sense for each, by the end of its answer and the room
        in the context. `other_rows` are rows of sequences in the same pass that have no policy.
        """
        self._round += 1
        n = len(policies)
        members = self._members
        known = n == len(members) and n + other_rows == self._forecast.base
        known = known and all(map(is_, policies, members))
        if known and self._idle > 0:
            self._idle -= 1
            return [0] * n
        if not known or self._round >= self._replan_at:
            self._plan(policies, other_rows)
            if not self._drafting or self._idle > 0:
                return [0] * n
        n_draft, least = self._n_draft, self._least
        return [
            n_draft if (policy.drafting or policy.probing) and limit >= least else 0
            for policy, limit in zip(policies, limits, strict=True)
        ]

    def widths(
        self,
        policies: Sequence[Policy],
        drafts: Sequence[Draft],
        limits: Sequence[int],
    ) -> list[int]:
        """Rows to verify for each sequence, its anchor included: 1 verifies nothing.

        `drafts` are empty where nothing was drafted.
        """
        chains: list[list[float]] = []
        for policy, draft, limit in zip(policies, drafts, limits, strict=True):
            if not draft or limit < 1:
                chains.append([])
                continue
            known = self.prior.rounds >= _KNOWN_ROUNDS
            early = policy.probing or policy.rounds < _EARLY_ROUNDS
            chains.append(policy.chances(draft, limit, early=early, believed=known))
            policy.rounds += 1
            policy.rest_from = self._round
        purse = self._purse.amount if self._exploring else None
        last_rows = self._passes.rows(self._shape)
        return self._row_choice.widths(chains, last_rows, self.costs.switch_s, purse)

    def observe(self, policy: Policy, draft: Draft, tokens: Sequence[int]) -> None:
        """What became of a draft: the tokens emitted after its anchor, the last the target's own.

        Not needed where nothing was verified.
        """
        policy.observe(draft, tokens)
        self._accepted += len(tokens) - 1

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
    ) -> None:
        """The times of a round: rows of its target pass and their shape, sequences that drafted,
        cached tokens.

        `host_s` is the rest of the round, where the caller knows it. `rebuilt`: llama.cpp has built
        its graph again, whether the row count is another or not. Not for rounds of which
        `n_drafts` was not asked, except plain ones.
        """
        costs = self.costs
        self._depth = depth
        self._passes.observe(n_rows, depth, verify_s, shape, rebuilt=rebuilt)
        if n_rows == self._forecast.base:
            self._plain_at = self._round
        if host_s is not None:
            costs.observe_host(n_drafting > 0, host_s)
        if n_drafting:
            if not self._exploring:  # else it had many rows to inject
                costs.observe_draft(n_drafting, depth, draft_s)
            usual_s = costs.step_s(n_rows, depth, shape)
            if self._passes.fresh and not self._exploring:
                # Graphs are made once; what a drafter is worth, they do not tell.
                verify_s = min(verify_s, usual_s)
            expected = costs.host_s + costs.draft_host_s
            seconds = draft_s + verify_s + (expected if host_s is None else host_s)
            expected += costs.draft_s(n_drafting, depth) + usual_s
            self._settle(seconds, expected + costs.switch_s)

    # The plan

    def _plan(self, policies: Sequence[Policy], other_rows: int) -> None:
        now, purse, forecast = self._round, self._purse, self._forecast
        purse.earn(now)
        forecast.renew(len(policies), other_rows, self._depth)
        self._members = list(policies)
        able = [policy for policy in policies if not policy.off] if self._n_draft else []
        on, findings = self._best(able) if able else ([], None)
        if findings and now < purse.suspended_until:
            findings = replace(findings, suspended=True)
        if findings and (findings.suspended or not self._pays(findings.gain)):
            on = []
        self._least = findings.shortest if findings else 1
        rate = forecast.base / forecast.plain_s * (findings.gain if findings and on else 1.0)
        self._row_choice.price(forecast.base, forecast.passes, rate, self._shape)
        self._planned_at = now
        self._appoint(able, on, findings)
        wait = _LONGEST_PAUSE
        if findings and findings.suspended:
            wait = purse.suspended_until - now
        elif resting := [policy for policy in able if not policy.drafting]:
            wait = self._probe(resting, len(on))
        self._exploring = wait == 0 and not on
        self._drafting = bool(on) or wait == 0
        if self._drafting:
            self._idle = 2 if on and findings and self._forgets_plain(findings) else 0
            steps = forecast.look if self._exploring else 1 if self._early or wait == 0 else _REPLAN
            self._replan_at = now + self._idle + min(steps, max(wait, steps if wait == 0 else 1))
        else:
            self._idle = wait - 1
            self._replan_at = 0

    def _best(self, able: Sequence[Policy]) -> tuple[list[Policy], Findings]:
        """The best that drafting can do, with trees or without where that is left open: as before,
        unless the other has more of a lead than going there costs."""
        names = {name for policy in able for name in policy.shapes}
        found: dict[ShapeName, tuple[list[Policy], Findings]] = {}
        for name in sorted(names):
            for policy in able:
                policy.take(name)
            found[name] = self._forecast.best(able)
        lead = GAIN_TO_BEGIN + self._forecast.switch / _PHASE
        gains = {name: findings.gain for name, (_, findings) in found.items()}
        if self._shape in gains:
            gains[self._shape] *= lead
        self._shape = max(gains, key=gains.__getitem__)
        for policy in able:
            policy.take(self._shape)
        return found[self._shape]

    def _appoint(
        self, able: Sequence[Policy], on: Sequence[Policy], findings: Findings | None
    ) -> None:
        """Those of `able` that are `on` draft from now on, the others no more."""
        self._early = False
        for policy in able:
            was, policy.drafting = policy.drafting, any(policy is other for other in on)
            policy.probing = False
            policy.findings = findings
            if policy.drafting:
                policy.failures = 0
                self._early = self._early or policy.rounds < _EARLY_ROUNDS
            elif was:
                early_end = policy.rounds < 2 * _EARLY_ROUNDS
                policy.failures = 0 if early_end else 3
                policy.next_probe = self._round + (2 if early_end else _FIRST_PAUSE)

    def _forgets_plain(self, findings: Findings) -> bool:
        """Whether to decode plainly for a moment: a device on which plain decoding is faster than
        it was measured would never be found out by drafting. A small part of the time."""
        loss = 2 * (findings.gain - 1) + 2 * self._forecast.switch
        a_round = findings.tokens / self._forecast.base / findings.gain
        return (self._round - self._plain_at) * a_round * _CHECK_SHARE > max(loss, 0.1)

    def _pays(self, gain: float) -> bool:
        """Whether to draft, where this many times the speed of plain decoding is expected.

        A few drafts tell little, so a loss must be large or last before drafting ends.
        """
        if self._purse.in_debt and self.prior.rounds < _KNOWN_ROUNDS:
            return False
        if not self._drafting or self._exploring:
            self._doubt = 0.0
            # The way there and back must be earned, too, in as long as answers are.
            return gain >= GAIN_TO_BEGIN + 2 * self._forecast.switch / _ANSWER
        # Plans that follow one another closely judge by the same drafts.
        weight = min((self._round - self._planned_at) * (1.0 if self._early else 0.5), 1.0)
        self._doubt = max(self._doubt + weight * (1.0 - gain), 0.0)
        # What going plain costs, and coming back: less is not worth the way.
        return self._doubt < max(_DOUBT, 1.5 * self._forecast.switch)

    def _probe(self, resting: list[Policy], n_on: int) -> int:
        """Let those whose time has come draft once, if the purse allows; rounds to wait if not."""
        forecast, now = self._forecast, self._round
        due = [policy for policy in resting if policy.next_probe <= now]
        if not due:
            return min(policy.next_probe for policy in resting) - now
        loss = forecast.probe_loss(due, n_on, now)
        if loss > self._purse.amount:  # then a few: what one learns is the others' prior
            due.sort(key=lambda policy: policy.rounds)
            due = due[: 1 + len(self._members) // 4]
            loss = forecast.probe_loss(due, n_on, now)
        # Of a drafter never seen, the first look is worth what it takes.
        first = self._untried and self.prior.rounds == 0 and loss <= _FIRST_LOOK * forecast.look
        if loss > self._purse.amount and not first:
            wait = self._purse.wait(loss, forecast.upkeep(len(due)))
            if wait is not None and wait < _LONGEST_PAUSE:
                return wait
            for policy in due:
                policy.off = True
            return _LONGEST_PAUSE
        self._untried = False
        for policy in due:
            policy.probing = True
            policy.survival.rest(now - policy.rest_from)
            policy.failures += 1
            pause = 1 if forecast.promises(policy) else min(2**policy.failures, _BACKOFF)
            policy.next_probe = now + pause
        if n_on:  # only a round of its own shows what it has really cost
            self._purse.amount -= loss
        return 0

    def _settle(self, seconds: float, expected: float) -> None:
        """After a round that drafted: how far it was ahead of plain decoding."""
        # A hiccup of the machine is not the drafts' fault.
        seconds = min(seconds, _HICCUP * expected)
        forecast = self._forecast
        gained = 1 + self._accepted / forecast.base - seconds / forecast.plain_s
        self._accepted = 0
        purse = self._purse
        learning = self.prior.rounds < _KNOWN_ROUNDS
        purse.settle(gained, self._round, exploring=self._exploring, learning=learning)
        if purse.losing or self._round < purse.suspended_until:
            self._replan_at = 0
