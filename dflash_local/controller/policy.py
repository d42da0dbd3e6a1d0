"""One request's part in the controller's decisions, and the text on them for a user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.controller.acceptance import Acceptance, whole
from dflash_local.controller.costs import KNOWN
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import Shape, ShapeName
from dflash_local.draft.tree import Chances

_BLEND = 0.15
"""The weight of the last draft in means that stand for the next ones. With less, the usual row
count is found too late."""
REPLAN = 8
"""Rounds between plans while drafting is on, and drafts of which one is also judged as a tree, if
trees are allowed: both take host time, up to a tenth of a tiny model's step. The prices of passes
are made again with every fourth plan."""


@dataclass(frozen=True)
class Findings:
    """A plan's results for the sequences of a batch; times in plain rounds.

    At its best, drafting verifies `drafts` drafts of all sequences, emits `tokens` a round and is
    `gain` times as fast as plain decoding. `draft_cost` is that of the
    draft stage, `double_cost` that of a pass of twice the rows of a plain one.
    """

    n_seqs: int
    drafts: int
    tokens: float
    gain: float
    draft_cost: float
    double_cost: float

    def text(self, drafting: bool) -> str:
        """One line: whether drafting is on, and why."""
        n = self.n_seqs
        if drafting:
            width = f"{self.drafts + n} rows" if n > 1 else f"width {self.drafts + 1}"
            return (
                f"drafting is on: {self.tokens:.1f} tokens a round at {width}, "
                f"{self.gain:.2f} times the speed of plain decoding"
            )
        if self.gain >= 1:
            return "drafting is off for a while: it has not paid so far"
        if self.double_cost >= 1.8:  # more than a good draft would bring, even for nothing
            return (
                f"drafting is off: checking {2 * n} tokens costs {self.double_cost:.1f} steps "
                "on this device"
            )
        if self.draft_cost >= 0.8:
            return (
                f"drafting is off: a draft alone costs {self.draft_cost:.1f} steps on this device"
            )
        return (
            f"drafting is off: at its best a round would give {self.tokens / n:.1f} tokens in the "
            f"time of {self.tokens / n / max(self.gain, 1e-9):.1f}"
        )


class Policy:
    """The controller's state of one request."""

    def __init__(self, known: Acceptance, shapes: Sequence[Shape], now: int) -> None:
        """`shapes`: those that its drafts may have; `now` is the controller's round."""
        self.known = known
        self.shapes: dict[ShapeName, Shape] = {shape.name: shape for shape in shapes}
        self.shape = shapes[0]
        """Of its next draft, as the last plan wants it."""
        self.drafting = False
        self.has_drafter = True
        self.off = False
        """For good: no draft will be asked for again, so the drafter needs no more of the text."""
        self.nearly_off = False
        """Off for good, unless the next rounds show that costs were measured wrong."""
        self.rest_from = now
        """The round of its last draft, or when it began."""
        self.findings: Findings | None = None
        self._curves: dict[ShapeName, list[float]] = {}
        self._n_tried = self._n_kept = 0
        self._promised = 0.0

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
        """Take in a new draft. Returns the falling chances of its nodes to be accepted."""
        name, known, self.rest_from = self.shape.name, self.known, now
        found = known.chances(draft, name)
        self._notice(found, name)
        for other in self.shapes:
            if other != name and (other == "chain" or now % REPLAN == 0):
                candidates = draft.candidates
                curve = known.of_other_shape(candidates, other) if candidates else found
                self._notice(curve, other)
        return found

    def _notice(self, curve: list[float], name: ShapeName) -> None:
        """The chances of a new draft, if it had that shape."""
        self.known.notice(curve, name)
        mean = self._curves.get(name, self.known.usual(name))
        self._curves[name] = [
            old + _BLEND * (new - old)
            for old, new in zip(mean, whole(curve, mean, name), strict=False)
        ]

    def observe(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Take in the outcome of a draft: the tokens emitted after its anchor."""
        n_tried = self.known.observe(draft, tokens)
        known = draft.candidates
        told = draft.logprobs if known is None else known.logprobs[:, 0].tolist()
        self._n_tried += n_tried
        self._n_kept += min(len(tokens) - 1, n_tried)
        self._promised += sum(math.exp(min(lp, 0.0)) for lp in told[:n_tried] if lp < math.inf)

    @property
    def reason(self) -> str:
        """One line: whether drafting is on, and why."""
        if not self.has_drafter:
            return "no drafter: what the text has already is drafted where that pays"
        if self.findings is None:
            return "drafting has not been tried yet"
        return self.findings.text(self.drafting)

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
