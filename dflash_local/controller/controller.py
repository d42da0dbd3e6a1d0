"""Whether to draft, and the number of rows to verify: those with most tokens a second."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from math import exp, inf
from operator import sub

import numpy as np
from numpy.typing import NDArray

from dflash_local.controller.acceptance import Acceptance, blended
from dflash_local.controller.costs import CONFIRMED, KNOWN, Costs
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import Chain, Shape, ShapeName
from dflash_local.draft.tree import Chances

_Way = tuple[ShapeName, int, int]
"""Shape and length of drafts, and the number of them that is verified: of each sequence where all
get as many rows, else of all together."""

_HORIZON = 20
"""Rounds over which a change of graph must be earned. With none, or with very many, graphs change
too often or never, at a third of the speed."""
_BLEND = 0.15
"""The weight of the last draft in means. With less, the usual row count is found too late."""
_REPLAN = 8
"""Rounds between plans while drafting is on, and between those whose chains are also judged as
trees: both take host time."""
_SEEN = 3
"""Drafts that are verified in a look, and of a drafter that is not known, whatever their
confidence. With none, a good drafter whose confidence says nothing is never found to be good."""
_FIRST, _INCOME = 3.0, 0.004
"""Plain rounds that looks may lose: at first, and for each round. With twice as much for each,
`h200-8b-bf16` and `h200-8b-hot` lose 2 to 9 % in some texts; with less, a text that has turned is
found too late."""
_CREDIT = 12.0
"""Plain rounds that drafting may lose in all before it is off for half of `CONFIRMED` rounds; each
time in a row for twice as many. Without it, `h200-8b-hot` loses 3 % in a drawn text, and `tiny-gpu`
and `h200-8b-q4` 2 % with an over-confident drafter."""
_COPY_MARGIN = 1.5
"""The tokens that rows of copies must bring for each plain row that they cost. With 1, a text that
repeats nothing pays for guesses that only just break even, two or three in a hundred."""


class Policy:
    """One request's part in the decisions."""

    def __init__(self, known: Acceptance, shapes: Sequence[Shape], now: int, reason: str) -> None:
        """`shapes` of its drafts; `now`: the controller's round; `reason`: a line for a user on
        whether drafting is on, and why."""
        self.known = known
        self.shapes: dict[ShapeName, Shape] = {shape.name: shape for shape in shapes}
        self.shape = shapes[0]
        """Of its next draft, as the last plan wants it."""
        self.off = False
        """For good: no draft will be asked for again, so the drafter needs no more of the text."""
        self.nearly_off = False
        """Off for good, unless the next rounds show that costs were measured wrong."""
        self.rest_from = now
        """The round of its last draft, or when it began."""
        self.reason = reason
        self._curves: dict[ShapeName, list[float]] = {}
        self._judged: tuple[Draft, ShapeName, list[float]] | None = None
        self._n_tried = self._n_kept = self._promised = 0.0

    def take(self, name: ShapeName) -> None:
        """Draft in that shape from now on, if the request allows it."""
        self.shape = self.shapes.get(name, self.shape)

    def rate(self, candidates: Candidates) -> Chances | None:
        """The estimated chances of candidates, for a tree."""
        return self.known.rate(candidates) if self.shape.name == "tree" else None

    def typical(self, length: int) -> list[float]:
        """The falling chances of its drafts' nodes, in the mean of the last ones. `length` are the
        tokens of a chain."""
        name, known = self.shape.name, self.known
        curve = self._curves.get(name) or known.usual(name)
        if known.n_verified < KNOWN:
            curve = list(map(max, curve, known.cold(name)))
        return curve if name == "tree" else curve[:length]

    def judge(self, draft: Draft, now: int) -> list[float]:
        """The falling chances of a new draft's nodes to be accepted. `learn` takes them in."""
        chances = self.known.chances(draft, self.shape.name)
        self._judged, self.rest_from = (draft, self.shape.name, chances), now
        return chances

    def learn(self) -> None:
        """Take in the chances of the draft that was judged last, and of its candidates as another
        shape. Apart from `judge`, as no round must wait for it: a tiny model's is 3 % shorter."""
        if self._judged is None:
            return
        known, (draft, name, chances), self._judged = self.known, self._judged, None
        curves = {name: chances}
        for other in self.shapes.keys() - curves:
            if other == "chain" or other not in self._curves or self.rest_from % _REPLAN == 0:
                curves[other] = known.of_other_shape(draft, other)
        for name, curve in curves.items():
            known.notice(curve, name)
            mean = self._curves.get(name, known.usual(name))
            self._curves[name] = blended(mean, curve, name, _BLEND)

    def observe(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Take in the outcome of a draft: the tokens emitted after its anchor."""
        self.learn()
        told = self.known.observe(draft, tokens)
        self._n_tried += len(told)
        self._n_kept += min(len(tokens) - 1, len(told))
        self._promised += sum(exp(min(lp, 0.0)) for lp in told if lp < inf)

    @property
    def warning(self) -> str | None:
        """One line where far fewer drafts are accepted than the drafter is sure of; else None."""
        if self._n_tried - self._n_kept < KNOWN:  # one bad passage is no fault of the pair
            return None
        kept, promised = self._n_kept / self._n_tried, self._promised / self._n_tried
        # Drafters that give no probabilities call every draft certain.
        if promised > 0.9999 or kept > 0.6 * promised:
            return None
        return (
            f"{kept:.0%} of the drafts are accepted where the drafter's own confidence promises "
            f"{promised:.0%}; likely causes: a thinking mode that the drafter was not trained for, "
            "another tokenizer or chat template, or another fine-tune of the target"
        )


class Rows:
    """Chooses the number of rows that a round verifies, for the batch of the last `price`: those
    that maximise

        expected tokens - rate * seconds

    which, with the rate at its long-run best, maximises tokens per second (renewal theory: Ross
    1970). Counts are of drafts: rows beyond a plain pass."""

    def __init__(self, *, equal: bool = False, pads: bool = False, few: bool = False) -> None:
        """`equal`: all sequences that draft get as many rows, for a GPU's graphs; `pads`: all of
        the pass get them, drafts or not, for recurrent targets. `few`: rows of drafts come in few
        numbers."""
        self._equal, self._pads, self._few = equal or pads, pads, few
        self.price(0, [0.0], 0.0, 0.0)

    def price(self, base: int, passes: Sequence[float], rate: float, switch_s: float) -> None:
        """A plain pass has `base` rows; one with k more takes `passes[k]` seconds. `rate`: the
        tokens a second that it must beat. A pass with other rows than the last one takes `switch_s`
        seconds more."""
        self._base, self.rate, self._switch = base, rate, rate * switch_s
        self._prices = [rate * (seconds - passes[0]) for seconds in passes]
        self._enough: dict[tuple[int, int], NDArray[np.float64]] = {}

    def choose(
        self, chains: Sequence[list[float]], last_rows: int | None, usual: int = 0
    ) -> list[int]:
        """Rows for each sequence, its anchor included, by the falling chances of its drafts.

        `last_rows` are those of the last pass; None: any pass will have a new graph. The rounds to
        come will have `usual` drafts again: another count costs a new graph for them, too.
        """
        brought, each = self.merged(chains), self.each(sum(map(bool, chains)), self._base)
        values = self._values(brought, each)
        usual, last = min(usual, len(values) - 1), self._last(last_rows, each)
        ways = [usual, max(self.counts(len(values)), key=values.__getitem__)]
        if 0 <= last < len(values):
            ways.append(last)
        n = max(ways, key=lambda k: values[k] - self._switch * ((k != last) + (k != usual)))
        if self._equal or len(chains) == 1:
            return [1 + n if chain or self._pads else 1 for chain in chains]
        least = brought[n - 1] if n else inf
        widths = [1 + sum(map(least.__lt__, chain)) for chain in chains]
        for i, chain in enumerate(chains):  # of those as likely as the last one, the first
            widths[i] += min(chain.count(least), len(chains) + n - sum(widths))
        return widths

    def least(self, n_seqs: int, last_rows: int | None) -> NDArray[np.float64]:
        """The least expected number of accepted drafts among the first k + 1 of one of `n_seqs`
        sequences, float64 by k. If all drafts of all of them stay below at each k, `choose` takes a
        plain pass; with one sequence, it does so in no other case."""
        last = self._last(last_rows, 1)
        kind = n_seqs, last
        if kind not in self._enough:
            # Beside a plain pass, drafts pay the way back, and after one the way there as well.
            least = np.array(self._prices[1:]) + self._switch * (1 if last else 2)
            if 0 < last <= len(least):
                least[last - 1] -= self._switch  # to stay there costs no change
            if self._pads:
                least = least[self._base - 1 :: self._base] / n_seqs
            elif n_seqs > 1:
                counts = np.arange(1.0, len(least) + 1.0)
                least = (least / counts).min(initial=inf) * counts
            self._enough[kind] = least
        return self._enough[kind]

    def value(self, chances: list[float]) -> float:
        """The worth in tokens of the best part of a draft with these falling chances, beside a
        plain pass."""
        return max(self._values(chances, self.each(1, self._base)))

    def each(self, n_drafting: int, base: int) -> int:
        """The rows of a pass that one draft more takes, if so many of `base` sequences draft."""
        if self._pads:
            return base
        return max(n_drafting, 1) if self._equal else 1

    def counts(self, n: int) -> Iterable[int]:
        """The numbers of drafts below `n` that may be verified."""
        return spaced(n - 1) if self._few else range(n)

    def merged(self, chains: Sequence[list[float]]) -> list[float]:
        """The tokens that each further draft brings, by the falling chances of all sequences: the
        likeliest first, or one more of each chain at once."""
        if len(chains) == 1:
            return chains[0]
        if self._equal:
            return list(map(sum, zip_longest(*chains, fillvalue=0.0)))
        return sorted((chance for chain in chains for chance in chain), reverse=True)

    def _last(self, rows: int | None, each: int) -> int:
        """The drafts of the last pass, if one more may have as many rows; else -1."""
        n, rest = divmod(-1 if rows is None else rows - self._base, each)
        return -1 if rest else max(n, -1)

    def _values(self, chances: Sequence[float], each: int) -> list[float]:
        """The tokens that drafts bring, less the worth of their time, by their number."""
        return list(map(sub, accumulate(chances, initial=0.0), self._prices[::each]))


def spaced(n: int) -> list[int]:
    """Of 0 to n drafts those that make 1, 2, 4, ... rows with the anchor, and n. A GPU records a
    graph for each count, in three plain steps of the 35B-A3B shape on an H200."""
    return [*((1 << i) - 1 for i in range(n.bit_length())), n]


class Controller:
    """Decides for all sequences of one engine. In each round: `n_drafts`, and with copies
    `skip_drafter_for_sure_copies`; `judge` the drafts, and by their chances, once copies have
    joined, the `rows`; `observe` for each draft that was verified; `observe_round`. If no sequence
    drafts, `least_copied` says which copies are worth a look. No clock and no randomness: the same
    measurements give the same decisions."""

    def __init__(
        self,
        costs: Costs,
        block_size: int,
        greedy: Acceptance | None = None,
        sampled: Acceptance | None = None,
        n_nodes: int = 0,
        n_copied: int = 0,
        *,
        equal_rows: bool = False,
        pads: bool = False,
        few_counts: bool = False,
    ) -> None:
        """`block_size` rows with the anchor are the most that a sequence verifies of a drafter's
        chain, 1 without a drafter; `n_nodes` those of a tree without it, and `n_copied` those of
        a copy; 0 if there are none. `equal_rows`, `pads` and `few_counts` are as for `Rows`; with
        few counts, drafts have few lengths, too."""
        self.costs = costs
        self.known = {
            True: greedy or Acceptance(block_size, n_nodes),
            False: sampled or Acceptance(block_size, n_nodes),
        }
        """By whether the request is greedy: a draw hits the likeliest draft less often."""
        self._n_draft = block_size - 1
        lengths = spaced(self._n_draft)[1:] if few_counts else range(1, block_size)
        self._lengths = lengths if costs.token_share else [self._n_draft]
        self._most = max(self._n_draft, n_nodes, n_copied)
        self._rows = Rows(equal=equal_rows, pads=pads, few=few_counts)
        self._copied = Rows(equal=equal_rows, pads=pads)
        self._newest = self.known[True]  # of the request that began last
        self._round = self._depth = 0
        self._asked: list[int] = []  # the lengths of drafts of rounds that were not observed
        # The batch, the rows of its plain pass, and the prices of passes
        self._members: list[Policy] = []
        self._base = self._priced_at = 0
        self._prices: dict[ShapeName, list[float]] = {}
        # The plan in force: shape, length and number of drafts, if any; who looks whether it pays
        self._way: _Way = ("chain", self._n_draft, 0)
        self._on = False
        self._looking: Policy | None = None
        self._planned_at = self._replan_at = self._off_until = 0
        # Plain rounds: lost by the plans' forecasts, by looks, by this one at most; left to lose
        self._doubt, self._spent, self._loss, self._credit = 0.0, 0.0, 0.0, _CREDIT
        self._pause, self._accepted = CONFIRMED // 2, 0  # rounds; drafts of this round

    def open(
        self, depth: int = 0, *, greedy: bool = True, shapes: Sequence[Shape] | None = None
    ) -> Policy:
        """A request begins, after `depth` tokens in all caches, whose drafts may have these shapes:
        chains alone if there are none."""
        self._depth = depth or self._depth
        self._newest = self.known[greedy]
        without = "no drafter: what the text has already is drafted where that pays"
        why = "drafting has not been tried yet" if self._n_draft else without
        return Policy(self._newest, shapes or [Chain(self._n_draft)], self._round, why)

    @property
    def idle(self) -> int:
        """The next rounds that are plain whatever is asked."""
        return 0 if self._on or self._looking else max(self._replan_at - self._round - 1, 0)

    @property
    def may_draft(self) -> bool:
        """Whether a request that begins now may well draft, as far as is known."""
        return self._on or bool(self._looking) or self._newest.n_verified < KNOWN

    @property
    def may_wait(self) -> bool:
        """Whether a round may be observed after the next `n_drafts`: that plans only for others."""
        return self._on

    def n_drafts(
        self, policies: Sequence[Policy], limits: Sequence[int], n_others: int = 0
    ) -> list[int]:
        """The number of tokens to draft for each sequence; 0: do without the drafter this round.

        `limits` are the most drafts that make sense for each, by the end of its answer and the room
        in the context. `n_others` sequences of the same pass have no policy.
        """
        self._round += 1
        same = len(policies) + n_others == self._base and list(policies) == self._members
        if not same or (self._round >= self._replan_at and not (self._on and self._asked)):
            self._plan(policies, n_others)
        _, length, _ = self._way
        self._asked = [*(self._asked if same else ()), length]
        return [
            length if limit > 0 and not p.off and (self._on or p is self._looking) else 0
            for p, limit in zip(policies, limits, strict=True)
        ]

    def skip_drafter_for_sure_copies(
        self, policies: Sequence[Policy], n_drafts: Sequence[int], copies: Sequence[list[float]]
    ) -> list[int]:
        """`n_drafts`, without those sequences whose copies, with these falling chances, are so sure
        that the drafter is not asked."""
        if self._looking:
            return list(n_drafts)
        costs, rows, n_drafting = self.costs, self._rows, max(sum(map(bool, n_drafts)), 1)
        shape, length, _ = self._way
        saved_s = self.draft_s(n_drafting) + costs.draft_host_s
        if shape == "tree":  # the pass of a copy is that of a chain: there and back
            saved_s -= 2 * costs.switch_s

        def does_without(policy: Policy, copied: list[float]) -> bool:
            if self._copied.choose([copied], costs.last_rows("chain")) == [1]:
                return False  # the round would be plain
            both = list(map(max, zip_longest(copied, policy.typical(length), fillvalue=0.0)))
            return rows.value(both) - rows.value(copied) < saved_s / n_drafting * rows.rate

        return [
            0 if n and curve and does_without(policy, curve) else n
            for policy, n, curve in zip(policies, n_drafts, copies, strict=True)
        ]

    def judge(self, policies: Sequence[Policy], drafts: Sequence[Draft]) -> list[list[float]]:
        """For each sequence the falling chances of its draft's tokens to be accepted."""
        chains: list[list[float]] = []
        for policy, draft in zip(policies, drafts, strict=True):
            found = policy.judge(draft, self._round) if draft else []
            if policy.known.n_verified < KNOWN:
                found = [1.0] * min(_SEEN, len(found)) + found[_SEEN:]
            chains.append(found)
        return chains

    def rows(self, chains: Sequence[list[float]], *, drafted: bool = True) -> list[int]:
        """Rows to verify for each sequence, its anchor included: 1 verifies nothing. `chains` are
        the falling chances of the drafts, as `judge` gives them, or once copies have joined them.
        `drafted`: the drafter had a part in the round; otherwise they are copies alone."""
        if not drafted:
            return self._copied.choose(chains, self.costs.last_rows("chain"))
        if self._looking:
            return [1 + min(_SEEN, len(chain)) for chain in chains]
        shape, _, usual = self._way
        return self._rows.choose(chains, self.costs.last_rows(shape), usual if self._on else 0)

    def least_copied(self, n_seqs: int) -> NDArray[np.float64]:
        """The least expected number of right tokens among the first k + 1 of a copy, float64 by k,
        in a round in which none of `n_seqs` sequences drafts: below it, `rows` takes none."""
        return self._copied.least(n_seqs, self.costs.last_rows("chain"))

    def draft_s(self, n_seqs: int) -> float:
        """Seconds of a draft stage, with drafts of the planned length."""
        return self.costs.draft_s(n_seqs, self._depth, self._n_draft - self._way[1])

    def observe(self, policy: Policy, draft: Draft, tokens: Sequence[int]) -> None:
        """Take in a verified draft's outcome: the tokens after its anchor; the last is drawn."""
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
        host_s: float,
        *,
        n_steps: int = 1,
        rebuilt: bool = False,
        n_injected: int = 0,
        inject_s: float = 0.0,
        n_others: int = 0,
    ) -> None:
        """The seconds of a round; `host_s` is the rest of it. `n_rows` of its pass had that shape;
        `n_drafting` sequences drafted, after `depth` cached tokens in all.

        `n_steps`: the times are means of so many plain rounds, at most `idle` and the one that was
        asked for. `rebuilt`: llama.cpp has built its graph again. `n_injected` rows were injected
        for its drafts, in the draft stage or in `inject_s` before it. `n_others` of those that
        drafted have no policy: such a round says nothing of whether drafting pays for the rest.
        Only plain rounds may have passed without `n_drafts`.
        """
        costs, drafted = self.costs, n_drafting > 0
        length = self._asked.pop(0) if self._asked else self._way[1]
        for policy in self._members:
            policy.learn()
        self._round += n_steps - 1
        self._depth = depth
        costs.observe_pass(n_rows, depth, verify_s, shape, n_steps, rebuilt)
        if drafted or n_rows <= self._base:
            costs.observe_host(drafted, host_s)
        if drafted:
            fewer = 0 if n_others else self._n_draft - length
            # Looks, and rounds after a prompt, have many rows to inject.
            n_injected = n_injected if self._looking or inject_s else 0
            costs.observe_draft(n_drafting, depth, draft_s + inject_s, fewer, n_injected)
            if not n_others:
                once_s = inject_s if self._looking else 0.0  # prompts are injected once
                self._settle(once_s + draft_s + verify_s + host_s)
            elif self._looking:  # its own part of the time is not known
                self._spent += self._loss
        self._accepted = 0
        if self._asked and self._on and self._round >= self._replan_at:
            self._plan(self._members, self._base - len(self._members))

    def _settle(self, seconds: float) -> None:
        """After a round that drafted: its lead over plain decoding."""
        gained = 1 + self._accepted / self._base - seconds / self._prices_of("chain")[0]
        if self._looking:
            self._spent = max(self._spent - gained, 0.0)
            return
        self._credit = min(self._credit + gained, 2 * _CREDIT)
        self._pause = CONFIRMED // 2 if self._credit >= 2 * _CREDIT else self._pause
        if self._credit < 0:
            self._credit, self._off_until = _CREDIT, self._round + self._pause
            self._pause, self._replan_at = 2 * self._pause, 0

    def _plan(self, policies: Sequence[Policy], n_others: int) -> None:
        """Whether to draft for the rounds to come, or to look whether it pays."""
        now, costs, base = self._round, self.costs, len(policies) + n_others
        new = base != self._base or len(policies) != len(self._members)
        if new or not self._on or now >= self._priced_at + 4 * _REPLAN:
            self._prices, self._priced_at = {}, now
        self._base, self._members = base, list(policies)
        passes = self._prices_of("chain")
        switch = costs.switch_s / passes[0]
        able = [policy for policy in policies if not policy.off] if self._n_draft else []
        gain = self._best(able, switch) if able else 0.0
        # What going there costs must be earned; and a few drafts tell little: what is lost in all
        # rounds together must be worth the way there and back (2 % of `moe`, 15 % of `tiny-gpu`).
        lost = (now - self._planned_at) * (1 - gain)
        self._doubt = max(self._doubt + lost, 0.0) if self._on else 0.0
        pays = self._doubt <= 2 * switch if self._on else gain >= 1 + switch / _HORIZON
        self._on, self._planned_at, self._looking = pays and now >= self._off_until, now, None
        reason = self._reason(able, gain) if able else ""
        for policy in able:
            policy.reason, policy.nearly_off = reason, False
        rate = base / passes[0] * (max(gain, 1.0) if self._on else 1.0)
        self._copied.price(base, passes, _COPY_MARGIN * rate, costs.switch_s)
        self._rows.price(base, self._prices_of(self._way[0]), rate, costs.switch_s)
        if self._on:
            wait = 1 if any(policy.known.n_verified < KNOWN for policy in able) else _REPLAN
        else:
            wait = max(self._off_until - now, 0) or (self._look(able) if able else CONFIRMED)
        self._replan_at = now + wait

    def _best(self, able: Sequence[Policy], switch: float) -> float:
        """Choose the best drafts, or the last ones unless others earn the change; their gain."""
        found: dict[_Way, float] = {}
        for name in sorted({name for policy in able for name in policy.shapes}):
            for policy in able:
                policy.take(name)
            for length in self._lengths:
                found |= self._gains(able, name, length)
        last, gain = self._way, found.get(self._way, 0.0)
        self._way = max(found, key=found.__getitem__)
        if self._on and gain * (1 + switch / _HORIZON) >= found[self._way]:
            self._way = last
        for policy in able:
            policy.take(self._way[0])
        return found[self._way]

    def _reason(self, able: Sequence[Policy], gain: float) -> str:
        """One line for a user: whether drafting is on, and why."""
        costs, depth, n = self.costs, self._depth, self._base
        _, length, k = self._way
        tokens = n + sum(self._rows.merged([policy.typical(length) for policy in able])[:k])
        n_rows = n + k * self._rows.each(len(able), n)
        if self._on:
            width = f"{n_rows} rows" if n > 1 else f"width {n_rows}"
            speed = f"{gain:.2f} times the speed of plain decoding"
            return f"drafting is on: {tokens:.1f} tokens a round at {width}, {speed}"
        if gain >= 1:
            return "drafting is off for a while: it has not paid so far"
        pair = costs.step_s(2 * n, depth) / costs.step_s(n, depth)
        draft = self.draft_s(len(able)) / self._prices_of("chain")[0]
        if pair >= 1.8:  # more than a good draft would bring, even for nothing
            why = f"checking {2 * n} tokens costs {pair:.1f} steps on this device"
        elif draft >= 0.8:
            why = f"a draft alone costs {draft:.1f} steps on this device"
        else:
            each, time = tokens / n, tokens / n / max(gain, 1e-9)
            why = f"at its best a round would give {each:.1f} tokens in the time of {time:.1f}"
        return f"drafting is off: {why}"

    def _gains(self, able: Sequence[Policy], shape: ShapeName, length: int) -> dict[_Way, float]:
        """The speed-up over plain decoding by drafts as the last ones were, by their number."""
        passes, rows = self._prices_of(shape), self._rows
        chances = rows.merged([policy.typical(length) for policy in able])
        tokens = list(accumulate(chances, initial=float(self._base)))
        times = passes[:: rows.each(len(able), self._base)]
        draft_s = self.costs.draft_s(len(able), self._depth, self._n_draft - length)
        once_s, plain_s = draft_s + self.costs.draft_host_s, passes[0] / self._base
        return {
            (shape, length, k): tokens[k] * plain_s / (once_s + times[k])
            for k in rows.counts(min(len(tokens), len(times)))
        }

    def _look(self, able: Sequence[Policy]) -> int:
        """Let one sequence draft in this round to see whether it pays, if that is not too dear;
        rounds to wait if it is."""
        costs = self.costs
        policy = max(able, key=lambda each: each.rest_from)  # the fewest rows to inject
        passes, plain_s = self._prices_of(policy.shape.name), self._prices_of("chain")[0]
        n_seen = min(_SEEN, len(passes) - 1)
        length = min(n for n in self._lengths if n >= min(_SEEN, self._n_draft))
        self._way = self._way[0], length, 0
        seconds = self.draft_s(1) + costs.draft_host_s + 2 * costs.switch_s
        seconds += costs.inject_s * (self._round - policy.rest_from) + passes[n_seen] - plain_s
        loss = seconds / plain_s - sum(policy.typical(n_seen)[:n_seen]) / self._base
        upkeep = costs.inject_s / plain_s  # a look that waits has more to inject
        short = loss + self._spent - _FIRST - _INCOME * self._round
        if short <= 0 or (not policy.known.n_verified and self._round >= _FIRST / _INCOME):
            self._looking, self._loss = policy, max(loss, 0.0)
            # What many good rounds have saved is not lost at once in a text that turns.
            self._spent = max(self._spent, _INCOME * self._round)
            return 1
        if upkeep < _INCOME:
            return min(int(short / (_INCOME - upkeep)) + 1, CONFIRMED)
        for policy in able:
            policy.off, policy.nearly_off = self._round >= CONFIRMED, True
        return CONFIRMED

    def _prices_of(self, shape: ShapeName) -> list[float]:
        """Seconds of a pass with k rows beyond a plain one's, the host's part included."""
        if shape not in self._prices:
            costs, depth, base = self.costs, self._depth, self._base
            plain_s = costs.step_s(base, depth) + costs.host_s
            rows = range(base + 1, base + len(self._members) * self._most + 1)
            drafted = [costs.step_s(n, depth, shape) + costs.host_s for n in rows]
            self._prices[shape] = [plain_s, *drafted]
        return self._prices[shape]
