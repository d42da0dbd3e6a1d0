"""A draft that a model writes token by token: a chain of its likeliest ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest

if TYPE_CHECKING:
    from dflash_local.llama.native import TargetPass
    from dflash_local.target_model.target import Target
    from dflash_local.target_model.vocabulary import Vocabulary


@dataclass
class GrowingDraft:
    """A draft as far as it is written. It ends, too, where its chance, all of it together, is
    less than `least_chance`."""

    request: DraftRequest
    least_chance: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def draw(self, model: Target | TargetPass, output_row: int) -> int:
        """Add the likeliest token of a row of the model's last pass."""
        ids, logits = model.candidates(output_row, 1)
        self.add(int(ids[0]), float(logits[0]) - model.log_sum(output_row))
        return self.tokens[-1]

    def add(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def is_done(self, vocabulary: Vocabulary) -> bool:
        is_poor = sum(self.logprobs) < math.log(self.least_chance) and not self.request.whole
        is_long = len(self.tokens) >= self.request.n_draft
        return is_poor or is_long or vocabulary.ends_text(self.tokens[-1])

    def draft(self) -> Draft:
        return Draft.chain(self.tokens, self.logprobs)
