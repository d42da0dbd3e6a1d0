"""What the controller keeps of one sequence, and what it tells of its decision in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_local.draft_shape import DraftShape
from dflash_local.survival import Survival
from dflash_local.tree_survival import TreeSurvival

PROBED = 3
"""Drafts verified where the drafter's own confidence is not believed."""


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


@dataclass(eq=False)
class Policy:
    """One request's part in the decisions."""

    survival: Survival
    shape: DraftShape = "chain"
    forks: bool = False
    """Whether its drafts are trees, as the last plan wants it."""
    drafting: bool = False
    probing: bool = False
    """Drafts this round only, to see whether it pays."""
    off: bool = False
    """For good: no draft will be asked for again, so its context needs no more injections."""
    rounds: int = 0
    failures: int = 0
    """Probes since it last drafted."""
    rest_from: int = 0
    next_probe: int = 0
    findings: Findings | None = field(default=None, repr=False)

    def take(self, *, forks: bool) -> None:
        """Draft trees, or chains, as far as the request leaves it open."""
        self.forks = forks if self.shape == "auto" else self.shape == "tree"

    def typical(self, *, hopeful: bool = False) -> list[float]:
        """The falling chances of its drafts' tokens, in the mean of the last few drafts."""
        survival = self.survival
        if self.forks and isinstance(survival, TreeSurvival):
            return survival.tree_typical(hopeful=hopeful)
        return survival.typical(hopeful=hopeful)

    def chances(
        self, drafted: Sequence[float], limit: int, *, early: bool, believed: bool
    ) -> list[float]:
        """Of a new draft's tokens, at most `limit`, to be kept; falling.

        `drafted` are the log-probabilities of a chain, or if it `forks` the chances of a tree's
        nodes. `early`, seeing the outcome is worth something in itself, and the first few are taken
        as certain: the drafter's confidence is believed once its measure has been taken, and then
        by turns.
        """
        survival = self.survival
        hopeful, sure = self.probing, early and (not believed or self.failures % 2)
        if self.forks and isinstance(survival, TreeSurvival):
            survival.notice_tree(drafted)
            chances = survival.tree_hopeful(drafted) if hopeful else list(drafted)
        else:
            survival.notice(drafted)
            chain = drafted[:limit]
            chances = survival.hopeful(chain) if hopeful else survival.curve(chain)
        if sure:
            chances[:PROBED] = [1.0] * min(PROBED, len(chances))
        return chances[:limit]

    @property
    def reason(self) -> str:
        """One line: whether drafting is on, and why."""
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
