"""Costs of the parts of a round on this machine: measured, then followed while decoding."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields
from typing import Any

import numpy as np

from dflash_local.draft.shape import ShapeName

Table = Mapping[int, Mapping[int, float]]  # seconds by depth (cached tokens) and count

ROW_COUNTS = (1, 2, 8, 4, 16, 32, 9, 6, 3, 12, 24, 64, 48)
"""The row counts that are measured, in this order, as a slow machine gets no further than the
first."""
TO_MAKE = 2
"""Passes in which graphs are made: llama.cpp builds its own with the first of a kind, a GPU records
the second, to replay it. With 1, the second counts as a slow machine."""
CONFIRMED = 128
"""Passes after which a measurement is believed that rules drafting out. Without it, a plain step
that was measured in three lucky moments keeps drafting off for the whole of a long first answer."""
KNOWN = 16
"""Times or drafts by which something is known. A calibrated time counts as so many, a new one as
one of so many: one hiccup moves nothing, a throttling clock does. Until so many drafts are
verified, a drafter is thought to be good. Without this, `laptop-gpu` and `cpu-busy-at-first` lose 4
to 14 % in some texts."""
SLOW = 0.02
"""The part of what one pass or draft tells that is taken to hold for all row counts, or for the
next requests. Without it, a machine that slows down loses up to a fifth of its speed."""
_CLIP = 0.25
"""Surprise, in natural logarithms, beyond which a longer time says no more: without, a hiccup turns
drafting off. Of a shorter time all beyond this is believed at once. Times that are mostly as far
above the shortest were measured beside other work: with ten busy programs by 0.3 to 13."""
LEAST = 1e-9  # seconds of anything, and chances: keeps their logarithms finite
_MUCH = math.exp(_CLIP)
_NEW = 0.5  # what a count that was not measured weighs: never what a measured one does at first


@dataclass(eq=False)
class Costs:
    """Seconds of a target step, a draft stage and the work between, by rows and depth.

    From `steps[depth][rows]`, `drafts[depth][sequences]` and `trees[depth]`: the extra of a pass
    over a tree; None: trees cost what chains do. `switch_s`: the extra of going to another row
    count, which makes new graphs. `host_s`: the rest of any round; `draft_host_s`: the additional
    rest of a drafting one. `inject_s`: the draft stage's extra for each row of context injected
    beyond a round's own few. `token_share`: the part of the longest draft's time that each token
    fewer saves; 0 for a block that is drafted at once. `spread`: the distance of the median time of
    one kind of pass from the shortest, as a part of that. `budget_s`: the time that measuring was
    allowed. Raises ValueError for a table without a number, and for numbers that are no durations.
    """

    steps: InitVar[Table]
    drafts: InitVar[Table]
    switch_s: float = 0.0
    host_s: float = 0.0
    draft_host_s: float = 0.0
    inject_s: float = 0.0
    token_share: float = 0.0
    trees: InitVar[Mapping[int, float] | None] = None
    spread: float = 0.0
    budget_s: float = 0.0

    def __post_init__(self, steps: Table, drafts: Table, trees: Mapping[int, float] | None) -> None:
        self._steps, self._drafts = _Surface(steps), _Surface(drafts)
        self.depths = self._steps.depths
        """Cached tokens after which was measured: one depth, or a shallow and a deep one."""
        self._trees = _Surface({depth: {1: s} for depth, s in (trees or {0: 0.0}).items()})
        for number in fields(self):
            setattr(self, number.name, _duration(getattr(self, number.name)))
        # Of the passes since this began: rows and shape of the last ones, their number since a new
        # graph, the extra time of those that made it, and the number of all
        self._kind: tuple[int, ShapeName] = (0, "chain")
        self._made = self._n_passes = 0
        self._extra_s = 0.0
        self._was_long = False  # far above the usual one, when a time was last learnt

    @property
    def noise(self) -> str | None:
        """A warning if other work disturbed the measurement too much to rely on it."""
        why = f"times of the same pass differed by {self.spread:.0%}"
        then = "so the next load measures again; drafting adapts to what rounds take"
        told = f"this machine is busy with other work: {why}, {then}"
        return told if self.spread > _CLIP else None

    def step_s(self, n_rows: int, depth: int, shape: ShapeName = "chain") -> float:
        """One target pass of `n_rows` rows, all sequences together, after `depth` cached tokens."""
        tree_s = self._trees.at(1, depth) if shape == "tree" else 0.0
        return self._steps.at(n_rows, depth) + tree_s

    def draft_s(self, n_seqs: int, depth: int, fewer: int = 0) -> float:
        """The draft stage for `n_seqs` sequences with a round's rows to inject; 0 for none. Drafts
        are by `fewer` tokens shorter than the drafter's longest."""
        whole_s = self._drafts.at(n_seqs, depth) if n_seqs else 0.0
        return whole_s * (1 - fewer * self.token_share)

    def last_rows(self, shape: ShapeName) -> int | None:
        """The rows of the last pass, if one more over drafts of that shape would have its graph."""
        rows, last_shape = self._kind
        return rows if shape == last_shape else None

    def observe_pass(
        self, n_rows: int, depth: int, seconds: float, shape: ShapeName, n_steps: int, rebuilt: bool
    ) -> None:
        """A pass, or the mean of `n_steps` alike. `rebuilt`: llama.cpp built its graph again."""
        if rebuilt or (n_rows, shape) != self._kind:
            self._kind, self._made, self._extra_s = (n_rows, shape), 0, 0.0
        self._n_passes += n_steps
        is_new, usual_s = self._made < TO_MAKE, self.step_s(n_rows, depth, shape)
        # With what making graphs takes, a pass can only tell that it was thought to be too dear.
        if not is_new or seconds < usual_s / _MUCH:
            # At first, each pass of a mean counts, after one as long: it is no hiccup.
            was_long, self._was_long = self._was_long, seconds > usual_s * _MUCH
            is_wrong = was_long and self._was_long and self._n_passes < CONFIRMED
            for _ in range(n_steps if is_wrong else 1):
                self.observe_step(n_rows, depth, seconds, shape)
        self._made += n_steps
        self._extra_s += n_steps * (seconds - usual_s)
        if is_new and self._made >= TO_MAKE:
            extra_s = max(self._extra_s, 0.0)
            self.switch_s = min(self.switch_s, extra_s + TO_MAKE * usual_s)
            self.switch_s += min(extra_s - self.switch_s, _CLIP * usual_s) / KNOWN

    def observe_step(
        self, n_rows: int, depth: int, seconds: float, shape: ShapeName = "chain"
    ) -> None:
        """A pass for which all graphs were there."""
        rows_s = self._steps.at(n_rows, depth)
        tree_s = self.step_s(n_rows, depth, shape) - rows_s
        if 0 < seconds < (rows_s + tree_s) / _MUCH and tree_s:
            # Far less than was measured: the part of the tree was too long, not that of the rows.
            self._trees.observe(1, max(seconds - rows_s, LEAST) / tree_s)
            tree_s = self._trees.at(1, depth)
        # Nothing else tells apart what is due to a tree and what to its row count.
        self._steps.observe(n_rows, seconds / (rows_s + tree_s))

    def observe_draft(
        self, n_seqs: int, depth: int, seconds: float, fewer: int = 0, n_injected: int = 0
    ) -> None:
        """A draft stage with no more to inject than the rows of a round; or with `n_injected`:
        neither part takes longer than both, so costs measured on a busy machine come down."""
        known_s = self.draft_s(n_seqs, depth, fewer)
        if not n_injected or seconds < known_s / _MUCH:
            self._drafts.observe(n_seqs, seconds / known_s)
        if n_injected:
            self.inject_s = min(self.inject_s, seconds / n_injected)

    def observe_host(self, drafted: bool, seconds: float) -> None:
        """Take in the time of a round beside its draft stage and its target pass."""
        most = _CLIP * self._steps.at(1, self._steps.depths[0])
        if drafted:
            surprise = max(seconds - self.host_s, 0.0) - self.draft_host_s
            self.draft_host_s += min(max(surprise, -most), most) / KNOWN
        else:
            self.host_s += min(max(seconds - self.host_s, -most), most) / KNOWN

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the tables as they now are, with depths and counts as text, in seconds."""
        return {
            "step_s": self._steps.as_dict(),
            "draft_s": self._drafts.as_dict(),
            "tree_s": {depth: row["1"] for depth, row in self._trees.as_dict().items()},
            **{number.name: getattr(self, number.name) for number in fields(self)},
        }

    @classmethod
    def from_dict(cls, raw: Any) -> Costs:
        """From `as_dict`. Raises ValueError when it is not that."""
        try:
            numbers = {number.name: raw[number.name] for number in fields(cls)}
            return cls(raw["step_s"], raw["draft_s"], trees=raw["tree_s"], **numbers)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no costs: {error!r}") from None


class _Surface:
    """Seconds by count and depth: straight lines between the counts measured, and along the depth.

    Counts that are met while decoding become points of their own, because a curve has cliffs.
    """

    def __init__(self, table: Table) -> None:
        known = {int(d): {int(n): _duration(s) for n, s in row.items()} for d, row in table.items()}
        depths = sorted(depth for depth, row in known.items() if row)
        if not depths:
            raise ValueError("no costs: an empty table")
        self.depths = depths[:1] + depths[1:][-1:]
        shallow, deep = known[depths[0]], known[depths[-1]]
        self.counts = sorted(shallow)
        if self.counts[0] < 1:
            raise ValueError(f"no costs: a time of {self.counts[0]} rows")
        self._seconds = [max(shallow[n], LEAST) for n in self.counts]
        self._weights: list[float] = [KNOWN] * len(self.counts)
        self._drift = 1.0
        span = max(self.depths[-1] - self.depths[0], 1)
        both = [n for n in self.counts if n in deep]
        rises = [max(deep[n] - shallow[n], 0.0) / span for n in both] or [0.0]
        # Seconds that a cached token costs more in any pass and for each of its rows, by least
        # squares, neither below 0: each rise by itself is too noisy to go by.
        mean, rise = sum(both) / max(len(both), 1), sum(rises) / len(rises)
        tilt = np.polyfit(both, rises, 1)[0] if len(both) > 1 else 0.0
        self._row_s = min(max(float(tilt), 0.0), rise / max(mean, 1))
        self._token_s = rise - self._row_s * mean

    def at(self, n: int, depth: int) -> float:
        counts, known = self.counts, self._seconds
        i = bisect_left(counts, n)
        if i < len(counts):
            seconds = known[i]
            if i:
                part = (counts[i] - n) / (counts[i] - counts[i - 1])
                seconds += part * (known[i - 1] - seconds)
        elif i == 1:
            seconds = known[0] * n / counts[0]
        else:
            rise = max(known[-1] - known[0], 0.0) / (counts[-1] - counts[0])
            seconds = known[-1] + (n - counts[-1]) * rise
        seconds += (depth - self.depths[0]) * (self._token_s + self._row_s * n)
        return max(self._drift * seconds, LEAST)

    def observe(self, n: int, ratio: float) -> None:
        """A time was `ratio` of the known one.

        If it is far shorter than measured, the machine was busy then, and all counts that were not
        seen since were measured too long, too. Otherwise it is shared between count and machine, a
        fall as a rise: else swings would make wide passes seem to cost what narrow ones do.
        """
        if not 0 < ratio < math.inf:
            return
        i = bisect_left(self.counts, n)
        if i == len(self.counts) or self.counts[i] != n:  # from now on a point of its own
            self._seconds.insert(i, self.at(n, self.depths[0]) / self._drift)
            self._weights.insert(i, _NEW)
            self.counts.insert(i, n)
        if ratio < 1 / _MUCH and self._weights[i] in (_NEW, KNOWN):
            for j, weight in enumerate(self._weights):
                if weight == KNOWN or j == i:
                    self._seconds[j] *= ratio
            ratio = 1.0
        surprise = math.log(ratio)
        at_once, surprise = min(surprise + _CLIP, 0.0), min(max(surprise, -_CLIP), _CLIP)
        self._weights[i] += 1
        part = 1 / min(self._weights[i], KNOWN)
        common = SLOW / (part + SLOW)
        self._seconds[i] *= math.exp(at_once * (1 - common) + part * surprise)
        self._drift *= math.exp(at_once * common + SLOW * surprise)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """To the picosecond, so that a file that is read is written again as it was."""
        return {
            str(depth): {str(n): round(self.at(n, depth), 12) for n in self.counts}
            for depth in self.depths
        }


def _duration(seconds: Any) -> float:
    value = float(seconds)
    if not 0 <= value < math.inf:
        raise ValueError(f"no costs: {seconds!r} is no number of seconds")
    return value
