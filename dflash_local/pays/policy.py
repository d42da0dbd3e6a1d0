"""What the controller keeps of one sequence, and what it tells of its decision in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import Shape, ShapeName
from dflash_local.pays.chances import CHANCES
from dflash_local.pays.survival import Prior, Survival

PROBED = 3
"""Drafts verified where the drafter's own confidence is not believed. With 1, a good drafter whose
confidence says nothing is found too late; with more, probes are too dear to be made often."""
_SPARSE = 4
"""One in so many rounds with chains is also judged as a tree, if trees are allowed. Without this,
trees that begin to pay are never found; in each round, it costs a tiny model host time."""


@dataclass(frozen=True)
class Findings:
    """What a plan found for the sequences of a batch; times in plain rounds.

    At its best, drafting verifies `drafts` drafts of all sequences, emits `tokens` a round and is
    `gain` times as fast as plain decoding; a rest of an answer of fewer than `shortest` drafts is
    not worth one. `draft` is the draft stage, `double` a pass of twice the rows of a plain one.
    """

    n_seqs: int
    drafts: int
    shortest: int
    tokens: float
    gain: float
    draft: float
    double: float
    suspended: bool = False

    def text(self, drafting: bool) -> str:
        """One line: whether drafting is on, and why."""
        n = self.n_seqs
        if drafting:
            width = f"{self.drafts + n} rows" if n > 1 else f"width {self.drafts + 1}"
            return (
                f"drafting is on: {self.tokens:.1f} tokens a round at {width}, "
                f"{self.gain:.2f} times the speed of plain decoding"
            )
        if self.suspended:
            return "drafting is off for a while: its rounds took longer than their tokens are worth"
        if self.gain >= 1:
            return "drafting is off for a while: it has not paid so far"
        if self.double >= 1.5:
            return (
                f"drafting is off: checking {2 * n} tokens costs {self.double:.1f} steps "
                "on this device"
            )
        if self.draft >= 0.8:
            return f"drafting is off: a draft alone costs {self.draft:.1f} steps on this device"
        return (
            f"drafting is off: at its best a round would give {self.tokens / n:.1f} tokens in the "
            f"time of {self.tokens / n / max(self.gain, 1e-9):.1f}"
        )


class Policy:
    """One request's part in the decisions."""

    def __init__(self, prior: Prior, shapes: Sequence[Shape], now: int) -> None:
        """`shapes`: those that its drafts may have; `now` is the controller's round."""
        self.survival = Survival(prior)
        self._chances = {s.name: CHANCES[s.name](self.survival, prior) for s in shapes}
        self.shapes = {s.name: s for s in shapes}
        self.shape = shapes[0]
        """Of its next draft, as the last plan wants it."""
        self.drafting = False
        self.probing = False
        """Drafts this round only, to see whether it pays."""
        self.has_drafter = True
        self.off = False
        """For good: no draft will be asked for again, so the drafter needs no more of the text."""
        self.rounds = 0
        self.rest_from = now
        self.findings: Findings | None = None

    def take(self, name: ShapeName) -> None:
        """Draft in that shape from now on, if the request allows it."""
        self.shape = self.shapes.get(name, self.shape)

    def rate(self, candidates: Candidates) -> Candidates:
        """The candidates of a draft with what each is thought to be worth."""
        return self._chances[self.shape.name].rate(candidates)

    def typical(self) -> list[float]:
        """The falling chances of its drafts' nodes, in the mean of the last few drafts."""
        return self._chances[self.shape.name].typical()

    def chances(self, draft: Draft, limit: int, *, early: bool) -> list[float]:
        """The chances of a new draft's nodes, at most `limit`, to be accepted; they fall.

        `early`, while little is known of the drafter, seeing the outcome is worth something in
        itself, and the first few count as certain.
        """
        known = self._chances[self.shape.name]
        known.notice(draft)
        chances = known.of(draft, hopeful=self.probing)
        if early:
            chances[:PROBED] = [1.0] * min(PROBED, len(chances))
        return chances[:limit]

    def observe(self, draft: Draft, tokens: Sequence[int]) -> None:
        """What became of a draft: the tokens emitted after its anchor."""
        if draft.candidates is None:
            self.survival.observe(draft.logprobs, len(draft), len(tokens) - 1)
            return
        tree = self._chances.get("tree")
        if self.shape.name == "chain" and tree and self.rounds % _SPARSE == 0:
            tree.notice_candidates(draft.candidates)
        self.survival.observe_answer(draft.candidates, tokens)

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
        short = self.survival.shortfall()
        if short is None:
            return None
        kept, promised = short
        return (
            f"{kept:.0%} of the drafts are accepted where the drafter's own confidence promises "
            f"{promised:.0%}; likely causes: a thinking mode that the drafter was not trained for, "
            "another tokenizer or chat template, or another fine-tune of the target"
        )
