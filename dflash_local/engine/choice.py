"""One sequence's part in a round."""

from dataclasses import dataclass, field

from dflash_local.copies.copier import Copy
from dflash_local.draft.draft import Draft
from dflash_local.engine.sequence import Sequence

NO_DRAFT = Draft.chain([])


@dataclass
class Choice:
    """One sequence's part in a round. Limits and drafts count nodes, without the anchor; `n_rows`
    counts it."""

    sequence: Sequence
    limit: int
    """The most nodes to verify. A text's copies may be longer than the drafter's block."""
    n_draft: int = 0
    """The number of tokens to ask the drafter for; 0 for none."""
    copies: list[Copy] = field(default_factory=list)
    """The copies that its text offers."""
    draft: Draft = NO_DRAFT
    """At first the drafter's proposal, then the nodes to verify."""
    chances: list[float] = field(default_factory=list)
    """The falling chances of the draft's nodes, where somebody asks for them."""
    n_rows: int = 1
    """The new rows that it gets in the target's pass: its draft is cut to them. If all sequences of
    a pass need equally many, those beyond a shorter draft repeat the anchor's token and are never
    accepted."""
