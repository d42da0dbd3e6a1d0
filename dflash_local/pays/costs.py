"""What the parts of a round cost on this machine: measured, then refined while decoding."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from operator import mul
from typing import Any

from dflash_local.draft.shape import ShapeName

Table = Mapping[int, Mapping[int, float]]
"""Seconds by depth (cached tokens) and count (rows or sequences)."""

SIZES = (1, 2, 8, 4, 16, 32, 9, 6, 3, 12, 24, 64, 48)
"""The row counts that are measured, those first that say most, as a slow machine gets no further;
and that one sequence chooses among. Among all counts those win whose costs are thought to be too
low, and each is another graph for llama.cpp. Several sequences fill rows up for each other, and
need all counts."""

_LEAST_S = 1e-9
_SLOWEST = 0.06
"""The weight of an observation in the end: one hiccup moves nothing, a throttling clock does."""
_MEASURED = round(1 / _SLOWEST)
"""How many live observations a calibrated median counts as. With fewer, what all passes take longer
than they did when they were measured is held against the row count in use, and others look cheaper
than they are."""
_DRIFT = 0.02
"""The part of each surprise that is taken to hold for all counts: the machine, not the width.
Without it, a machine that slows down loses up to a fifth of its speed."""
_NOISY = 0.25
"""Medians so far above the shortest times were disturbed more often than not: on two cores with
ten other busy programs it was 0.3 to 13. Without, such times decide whether a pair drafts, and are
kept."""
_CLIP = 0.25
"""Surprise, in natural logarithms, beyond which an observation says no more: outliers. Without, a
hiccup turns drafting off. Nothing makes a machine faster for a moment, so a time that is far
shorter is believed at once."""

_TIMES = ("switch_s", "host_s", "draft_host_s", "inject_s", "after_draft_s")

_MOST_BACK = 200
"""Steps in which what slower times taught is taken back: those of a machine that was some fifty
times as slow. Without an end a time of nothing would be sought for ever."""

_SPAN = 1024
"""Where was measured at one depth alone: the cached tokens over which one may cost as much more or
less as one pass differs from the next. With few, what one row count costs more is taken for the
depth's; with many, the other way round."""

TO_MAKE = 2
"""Passes in which graphs are made: llama.cpp builds its own with the first of a kind, a GPU records
with the second what it will replay. With 1, the second counts as a slow machine."""


class Costs:
    """Seconds of a target step, a draft stage and what lies between, by rows and depth.

    `switch_s` is the extra of going to another row count: llama.cpp builds its graph anew, and a
    GPU records it with the pass after that. `host_s` is the rest of any round, `draft_host_s` what
    the rest of a drafting round has on top. `inject_s` is the draft stage's extra for each row
    of context injected beyond a round's own few. `after_draft_s` is what a pass after a draft takes
    longer than it was measured to, whatever its rows, or less than nothing. `trees` is the extra of
    a pass over a tree, by depth: llama.cpp looks at all cells for each of its ids, and where these
    are too few it makes a new graph each time. `spread` says how far the median of the times of one
    kind of pass was above the shortest, as a part of that: what else the machine did. `budget_s`
    are the seconds that measuring all this was allowed to take.
    """

    def __init__(
        self,
        steps: Table,
        drafts: Table,
        *,
        switch_s: float = 0.0,
        host_s: float = 0.0,
        draft_host_s: float = 0.0,
        inject_s: float = 0.0,
        after_draft_s: float = 0.0,
        trees: Mapping[int, float] | None = None,
        spread: float = 0.0,
        budget_s: float = 0.0,
    ) -> None:
        """`steps[depth][rows]`, `drafts[depth][sequences]` and `trees[depth]`, in seconds; None:
        trees cost what chains do.

        Raises ValueError for a table without a number, and for numbers that are no durations.
        """
        self._steps = _Surface(steps)
        self._drafts = _Surface(drafts)
        self.switch_s = _duration(switch_s)
        self.host_s = _duration(host_s)
        self.draft_host_s = _duration(draft_host_s)
        self.inject_s = _duration(inject_s)
        self.after_draft_s = float(after_draft_s)
        if not math.isfinite(self.after_draft_s):
            raise ValueError(f"{after_draft_s!r} is no time")
        by_depth = sorted((trees or {0: 0.0}).items())
        (depth, self._tree_s), (self._deep, deep_s) = by_depth[0], by_depth[-1]
        self._tree_depth = depth
        rise_s = max(_duration(deep_s) - _duration(self._tree_s), 0.0)
        self._tree_rise_s = rise_s / max(self._deep - depth, 1)  # for each cached token more
        self._unmeasured = _Unmeasured(
            self._steps.depths[-1] - self._steps.depth or _SPAN,
            self._steps.counts[-1],
            self._deep - depth or _SPAN,
        )
        self.spread = _duration(spread)
        self.budget_s = _duration(budget_s)
        self.n_observed = 0

    @property
    def noise(self) -> str | None:
        """What to tell if other work disturbed the measurement too much to be relied on."""
        if self.spread <= _NOISY:
            return None
        return (
            "this machine is busy with other work: times of the same pass differed by "
            f"{self.spread:.0%}, so they are not kept, and the next load measures again; drafting "
            "adapts to what rounds take"
        )

    def step_s(self, n_rows: int, depth: int, shape: ShapeName = "chain") -> float:
        """One target pass of `n_rows` rows, all sequences together, after `depth` cached tokens."""
        return self._steps.at(n_rows, depth) + self.extra_s(shape, depth)

    def extra_s(self, shape: ShapeName, depth: int) -> float:
        """What a pass over drafts of that shape takes longer than one over chains."""
        if shape == "chain":
            return 0.0
        return self._tree_s + self._tree_deep_s(depth)

    def _tree_deep_s(self, depth: int) -> float:
        """No more than where trees were seen: what is too cheap is found out by the first of them,
        and what is too dear would never be tried."""
        return self._tree_rise_s * max(min(depth, self._deep) - self._tree_depth, 0)

    def draft_s(self, n_seqs: int, depth: int) -> float:
        """The draft stage for `n_seqs` sequences with a round's rows to inject; 0 for none."""
        return self._drafts.at(n_seqs, depth) if n_seqs > 0 else 0.0

    def best_gain(self, n_draft: int, n_seqs: int) -> float:
        """How many times as fast as plain decoding drafting would be if every draft were accepted:
        at the best depth that was measured, with the best number of drafts up to `n_draft`, for one
        sequence or for `n_seqs`."""
        best = 0.0
        for depth in self.depths:
            for n in {1, n_seqs}:
                plain_s = self.step_s(n, depth) + self.host_s
                extra_s = self.draft_s(n, depth) + self.draft_host_s + self.host_s
                for width in range(2, n_draft + 2):
                    seconds = extra_s + self.step_s(n * width, depth)
                    best = max(best, width * plain_s / seconds)
        return best

    def observe_step(
        self,
        n_rows: int,
        depth: int,
        seconds: float,
        shape: ShapeName = "chain",
        *,
        drafted: bool = False,
    ) -> None:
        """A pass for which all graphs were there. `drafted`: after a draft.

        One over a tree mostly tells of its row count, which trees may be the only ones to have;
        chains of as many rows tell the two apart.
        """
        if not (seconds > 0 and math.isfinite(seconds)):
            return
        self.n_observed += 1
        self._learn(n_rows, depth, seconds, shape, drafted=drafted)
        self._bound(n_rows, depth, seconds, shape, drafted=drafted)

    def _learn(
        self, n_rows: int, depth: int, seconds: float, shape: ShapeName, *, drafted: bool
    ) -> None:
        self._learn_common(n_rows, depth, seconds, shape, drafted=drafted)
        extra_s = self.extra_s(shape, depth) + self.after_draft_s * drafted
        self._steps.observe(n_rows, depth, seconds - extra_s)

    def _bound(
        self, n_rows: int, depth: int, seconds: float, shape: ShapeName, *, drafted: bool
    ) -> None:
        """Nothing makes a machine faster for a moment: what slower passes taught is taken back step
        by step, as it was learnt. If falls were learnt otherwise than rises, each swing of the
        machine's speed would leave one part higher and another lower, till wide passes seem to
        cost what narrow ones do."""
        self._steps.bound(n_rows, depth, seconds)
        for _ in range(_MOST_BACK):
            known = self.step_s(n_rows, depth, shape) + self.after_draft_s * drafted
            if seconds >= known * math.exp(-_CLIP):
                break
            self._learn(n_rows, depth, seconds, shape, drafted=drafted)

    def _learn_common(
        self, n_rows: int, depth: int, seconds: float, shape: ShapeName, *, drafted: bool
    ) -> None:
        """Of a surprise, what depth, a tree and a draft before the pass explain: that must not be
        held against one row count. Depth may be found to cost nothing by a single pass."""
        steps, tree_tokens = self._steps, 0
        if shape == "tree":
            self._deep = max(self._deep, depth)
            tree_tokens = max(depth - self._tree_depth, 0)
        known = steps.at(n_rows, depth)
        surprise = seconds - known - self.extra_s(shape, depth) - self.after_draft_s * drafted
        tokens = depth - steps.depth
        deep_s = tokens * steps.slope(n_rows) + tree_tokens * self._tree_rise_s
        surprise = min(max(surprise, -_CLIP * known - max(deep_s, 0.0)), _CLIP * known)
        of_draft, of_token, of_row, of_tree, of_tree_token = self._unmeasured.gains(
            drafted, tokens, tokens * n_rows, shape == "tree", tree_tokens
        )
        self.after_draft_s += of_draft * surprise
        steps.learn_slope(of_token * surprise, of_row * surprise)
        self._tree_s = max(self._tree_s + of_tree * surprise, 0.0)
        self._tree_rise_s = max(self._tree_rise_s + of_tree_token * surprise, 0.0)

    def observe_draft(self, n_seqs: int, depth: int, seconds: float) -> None:
        """A draft stage that had no more to inject than the rows of a round."""
        if seconds > 0 and math.isfinite(seconds):
            self._drafts.observe(n_seqs, depth, seconds)
            self._drafts.take_back(n_seqs, depth, seconds)

    def bound_step(
        self, n_rows: int, depth: int, seconds: float, shape: ShapeName = "chain"
    ) -> None:
        """A pass that also made graphs: without them it takes no longer than this."""
        if seconds < self.step_s(n_rows, depth, shape):
            self._learn_common(n_rows, depth, seconds, shape, drafted=False)
        self._bound(n_rows, depth, seconds, shape, drafted=False)

    def observe_alone(self, n_rows: int, depth: int, seconds: float, shape: ShapeName) -> None:
        """A single pass without a draft between others of another kind, which also made its graph.
        Copies come one at a time, and nothing else would tell that their rows cost more than was
        measured. How much of it the graph took is not known: it cannot tell that they cost less."""
        own_s = seconds - self.switch_s
        if own_s > self.step_s(n_rows, depth, shape):
            self._learn(n_rows, depth, own_s, shape, drafted=False)

    def bound_draft(self, n_seqs: int, depth: int, seconds: float) -> None:
        """A draft stage that may have had more to inject: without that it takes no longer."""
        self._drafts.take_back(n_seqs, depth, seconds)

    def bound_injection(self, n_rows: int, seconds: float) -> None:
        """So many rows were injected within these seconds. Without this, injections that were
        measured on a busy machine stay too dear for good."""
        if n_rows:
            self.inject_s = min(self.inject_s, seconds / n_rows)

    def observe_switch(self, extra_s: float, usual_s: float) -> None:
        """What the passes that made new graphs took on top, all together; one takes `usual_s`."""
        extra_s = max(extra_s, 0.0)
        self.switch_s = min(self.switch_s, extra_s + TO_MAKE * usual_s)
        self.switch_s += _SLOWEST * min(extra_s - self.switch_s, _CLIP * usual_s)

    def observe_host(self, drafted: bool, seconds: float) -> None:
        """What a round took beside its draft stage and its target pass."""
        plain_s = self._steps.at(1, self._steps.depth)
        if drafted:
            extra_s = max(seconds - self.host_s, 0.0)
            self.draft_host_s += _SLOWEST * _clipped(extra_s - self.draft_host_s, plain_s)
        else:
            self.host_s += _SLOWEST * _clipped(seconds - self.host_s, plain_s)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the tables as they now are, with depths and counts as text, in seconds."""
        return {
            "step_s": self._steps.as_dict(),
            "draft_s": self._drafts.as_dict(),
            **{name: getattr(self, name) for name in _TIMES},
            "tree_s": {
                str(depth): self.extra_s("tree", depth)
                for depth in dict.fromkeys((self._tree_depth, self._deep))
            },
            "spread": self.spread,
            "budget_s": self.budget_s,
        }

    @classmethod
    def from_dict(cls, raw: Any) -> Costs:
        """From `as_dict`. Raises ValueError when it is not that."""
        try:
            return cls(
                _table(raw["step_s"]),
                _table(raw["draft_s"]),
                **{name: raw[name] for name in _TIMES},
                trees={int(depth): seconds for depth, seconds in raw["tree_s"].items()},
                spread=raw["spread"],
                budget_s=raw["budget_s"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no costs: {error!r}") from None

    @property
    def depths(self) -> list[int]:
        """The cached tokens after which was measured: one depth, or a shallow and a deep one."""
        return self._steps.depths


class _Unmeasured:
    """How far five numbers may be off that calibration tells little of: what a pass takes longer
    after a draft, what a cached token costs in any pass and for each of its rows, what a tree
    costs, and what each cached token does in a tree.

    A Kalman filter's covariance, in variances of the time of one pass. At first a cached token
    is known as well as two single passes would tell, which is all that was measured.
    """

    def __init__(self, span: int, most_rows: int, tree_span: int) -> None:
        """The cached tokens between the passes that were measured, and the rows of the widest."""
        self._units = 1, span, span * most_rows, 1, tree_span
        self._rows = [[float(i == j) for j in range(5)] for i in range(5)]

    def gains(self, *amounts: int) -> list[float]:
        """By how much of its surprise a pass corrects each, which had so much of them."""
        seen = [amount / unit for amount, unit in zip(amounts, self._units, strict=True)]
        common = [sum(map(mul, row, seen)) for row in self._rows]
        variance = sum(map(mul, common, seen))
        total = variance + 1.0
        if variance > _SLOWEST * total:  # else they are known, and still move as slowly as that
            for row, own in zip(self._rows, common, strict=True):
                row[:] = [x - own * other / total for x, other in zip(row, common, strict=True)]
        return [each / total / unit for each, unit in zip(common, self._units, strict=True)]


class _Surface:
    """Seconds by count and depth: straight lines between the counts measured, and along the depth.

    Counts that are met while decoding become points of their own, because a curve has cliffs.
    """

    def __init__(self, table: Table) -> None:
        depths = sorted(depth for depth, row in table.items() if row)
        if not depths:
            raise ValueError("no costs: an empty table")
        self.depth = depths[0]
        self.depths = [depths[0]] if len(depths) == 1 else [depths[0], depths[-1]]
        shallow, deep = table[self.depths[0]], table[self.depths[-1]]
        self.counts = sorted(shallow)
        if self.counts[0] < 1:
            raise ValueError(f"no costs: a time of {self.counts[0]} rows")
        self._seconds = [max(_duration(shallow[n]), _LEAST_S) for n in self.counts]
        self._weights = [_MEASURED] * len(self.counts)
        self._measured = dict(zip(self.counts, self._seconds, strict=True))
        self._least_part = 1.0
        self._drift = 1.0
        span = max(self.depths[-1] - self.depth, 1)
        both = [n for n in self.counts if n in deep]
        rises = [max(_duration(deep[n]) - shallow[n], 0.0) / span for n in both]
        self.token_s, self.row_s = _line(both, rises) if rises else (0.0, 0.0)
        self._measured_slopes = self.token_s, self.row_s

    def slope(self, n: int) -> float:
        """Seconds for each cached token more."""
        return self._drift * max(self.token_s + self.row_s * n, 0.0)

    def learn_slope(self, token_s: float, row_s: float) -> None:
        """A cached token takes so much more in any pass, and for each of its rows."""
        self.token_s += token_s / self._drift
        self.row_s = max(self.row_s + row_s / self._drift, 0.0)

    def at(self, n: int, depth: int) -> float:
        seconds = _between(self.counts, self._seconds, n)
        if len(self.counts) == 1:
            seconds *= n / self.counts[0]
        elif n > self.counts[-1]:
            seconds += (n - self.counts[-1]) * self._last_rise()
        more = (depth - self.depth) * self.slope(n)
        return max(self._drift * seconds + more, _LEAST_S)

    def observe(self, n: int, depth: int, seconds: float) -> None:
        """Learn from a time that is the count's own, as far as is known."""
        surprise = math.log(max(seconds, _LEAST_S) / self.at(n, depth))
        surprise = min(max(surprise, -_CLIP), _CLIP)
        i = self._point(n)
        self._weights[i] += 1
        self._seconds[i] *= math.exp(surprise * max(1 / self._weights[i], _SLOWEST))
        self._drift *= math.exp(surprise * _DRIFT)

    def bound(self, n: int, depth: int, seconds: float) -> None:
        """A pass of this time. If it is shorter than what is known, and than what was measured of
        any count so far, that was measured on a busy machine, and so were the counts that were not
        seen since."""
        if n not in self._measured or not 0 < seconds < self.at(n, depth) * math.exp(-_CLIP):
            return
        of_measured = seconds / self._measured_at(n, depth)
        more = of_measured / self._least_part
        if more > math.exp(-_CLIP):
            return
        self._least_part = of_measured
        i = self._point(n)
        self.token_s, self.row_s = self.token_s * more, self.row_s * more
        for j, weight in enumerate(self._weights):
            if j >= i and weight == _MEASURED:
                self._seconds[j] *= more
        self._drift = min(self._drift, 1.0)
        self._seconds[i] *= min(seconds / self.at(n, depth), 1.0)
        for j in range(i):
            self._seconds[j] = min(self._seconds[j], self._seconds[i])

    def take_back(self, n: int, depth: int, seconds: float) -> None:
        """What was learnt from slower times, step by step, as it was learnt."""
        self.bound(n, depth, seconds)
        for _ in range(_MOST_BACK):
            if not 0 < seconds < self.at(n, depth) * math.exp(-_CLIP):
                break
            self.observe(n, depth, seconds)

    def _measured_at(self, n: int, depth: int) -> float:
        token_s, row_s = self._measured_slopes
        return self._measured[n] + (depth - self.depth) * max(token_s + row_s * n, 0.0)

    def _point(self, n: int) -> int:
        """The place of a count among the points; it becomes one."""
        i = bisect_left(self.counts, n)
        if i == len(self.counts) or self.counts[i] != n:
            self._seconds.insert(i, self.at(n, self.depth) / self._drift)
            self._weights.insert(i, 1)
            self.counts.insert(i, n)
        return i

    def as_dict(self) -> dict[str, dict[str, float]]:
        """To the picosecond, so that what is read is written again as it was: the slope between two
        depths gives a time back but for its last bit."""
        return {
            str(depth): {str(n): round(self.at(n, depth), 12) for n in self.counts}
            for depth in self.depths
        }

    def _last_rise(self) -> float:
        """Seconds a count beyond the last point, over the upper half of the curve: two
        neighbouring points would say little."""
        last = self.counts[-1]
        low = next(i for i, n in enumerate(self.counts) if 2 * n >= last or n == self.counts[-2])
        low = min(low, len(self.counts) - 2)
        rise = (self._seconds[-1] - self._seconds[low]) / (last - self.counts[low])
        return max(rise, 0.0)


def _between(xs: list[int], ys: list[float], x: int) -> float:
    """On the broken line through the points; constant outside."""
    i = bisect_left(xs, x)
    if i == len(xs):
        return ys[-1]
    if xs[i] == x or i == 0:
        return ys[i]
    part = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + part * (ys[i] - ys[i - 1])


def _line(counts: list[int], rises: list[float]) -> tuple[float, float]:
    """Seconds that a cached token costs more in any pass and for each of its rows, by least
    squares, neither below 0: each rise by itself is too noisy to go by."""
    n, mean, rise = len(counts), sum(counts) / len(counts), sum(rises) / len(rises)
    spread = sum((count - mean) ** 2 for count in counts)
    tilt = sum((count - mean) * s for count, s in zip(counts, rises, strict=True))
    row_s = min(max(tilt / spread, 0.0), rise / mean) if n > 1 else 0.0
    return rise - row_s * mean, row_s


def _clipped(surprise: float, known: float) -> float:
    """Seconds more than were known, or fewer: a hiccup counts as a part of those."""
    return min(max(surprise, -_CLIP * known), _CLIP * known)


def _duration(seconds: Any) -> float:
    value = float(seconds)
    if not 0 <= value < math.inf:
        raise ValueError(f"no costs: {seconds!r} is no number of seconds")
    return value


def _table(raw: Any) -> dict[int, dict[int, float]]:
    return {
        int(depth): {int(n): _duration(s) for n, s in row.items()} for depth, row in raw.items()
    }


class PassTimes:
    """Hands the times of passes to `Costs`, each as what it is beside the pass before.

    llama.cpp keeps its graph over passes of as many rows, all of them chains or all with trees,
    until the cache has grown by so much.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._kind: tuple[int, ShapeName] = (0, "chain")
        self._made = 0  # passes since the last new graph, that one included
        self._extra_s = 0.0  # of those that made graphs
        self._alone: tuple[int, int, float, ShapeName] | None = None  # the last pass, if so
        self._skipped = 0
        self.fresh = False
        """Whether graphs were still made in the last pass."""

    def rows(self, shape: ShapeName) -> int | None:
        """Those of the last pass, if one more over drafts of that shape would have its graph."""
        rows, last_shape = self._kind
        return rows if shape == last_shape else None

    def skip(self, n_rounds: int) -> None:
        """The next time is the mean of so many passes more."""
        self._skipped = n_rounds

    def observe(
        self,
        n_rows: int,
        depth: int,
        seconds: float,
        shape: ShapeName = "chain",
        *,
        drafted: bool = False,
        rebuilt: bool = False,
    ) -> None:
        """`drafted`: after a draft. `rebuilt`: llama.cpp is known to have built its graph again."""
        costs, kind = self._costs, (n_rows, shape)
        n, self._skipped = 1 + self._skipped, 0
        if rebuilt or kind != self._kind:
            if self._alone:
                costs.observe_alone(*self._alone)
            self._kind, self._made, self._extra_s = kind, 0, 0.0
            self._alone = None if drafted or n > 1 else (n_rows, depth, seconds, shape)
        else:
            self._alone = None
        self.fresh = self._made < TO_MAKE
        if self.fresh:
            usual_s = costs.step_s(n_rows, depth, shape) + costs.after_draft_s * drafted
            costs.bound_step(n_rows, depth, seconds, shape)
            self._made += n
            self._extra_s += n * (seconds - usual_s)
            if self._made >= TO_MAKE:
                costs.observe_switch(self._extra_s, usual_s)
        else:
            costs.observe_step(n_rows, depth, seconds, shape, drafted=drafted)
