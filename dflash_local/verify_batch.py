"""The target batch of a round: the anchor and the draft of each sequence, and where they lie."""

from __future__ import annotations

from dflash_local.branches import Lines, lines
from dflash_local.draft import Draft


class VerifyBatch:
    """Rows of some sequences, one after the other; each begins with its anchor."""

    def __init__(self, n_branches: int) -> None:
        """`n_branches` are those that each sequence has."""
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.seq_ids: list[int] = []
        self.first_rows: list[int] = []
        self.lines: list[Lines | None] = []
        """By sequence: the branches of each row; None for a chain, which lies on the first."""
        self._n_branches = n_branches

    def add(self, seq: int, begin: int, anchor: int, draft: Draft, *, forks: bool = False) -> None:
        """A sequence whose anchor has the position `begin`. `forks`: its drafts are trees, and of
        those a chain is one like others."""
        self.first_rows.append(len(self.tokens))
        self.tokens += [anchor, *draft.tokens]
        self.seq_ids += [seq] * (1 + len(draft))
        self.positions += [begin, *(begin + depth for depth in draft.depths)]
        is_tree = forks and len(draft) > 0
        self.lines.append(lines(draft.parents, self._n_branches) if is_tree else None)

    @property
    def all_lines(self) -> Lines | None:
        """Of all rows; none where no sequence forks."""
        if not any(self.lines):
            return None
        ends = [*self.first_rows[1:], len(self.tokens)]
        return [
            row
            for found, begin, end in zip(self.lines, self.first_rows, ends, strict=True)
            for row in (found or [[0]] * (end - begin))
        ]
