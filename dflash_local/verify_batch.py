"""The target batch of a round: the anchor and the draft of each sequence, and where they lie."""

from __future__ import annotations

from dflash_local.branches import Lines, lines
from dflash_local.draft import Draft


class VerifyBatch:
    """Rows of some sequences, one after the other; each begins with its anchor."""

    def __init__(self, n_branches: int) -> None:
        """`n_branches` are the leaves that a draft may have."""
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.seq_ids: list[int] = []
        self.first_rows: list[int] = []
        self.lines: list[Lines | None] = []
        """By sequence: the branches of each row; None for a chain, which lies on all."""
        self._n_branches = n_branches

    def add(self, seq: int, begin: int, anchor: int, draft: Draft) -> None:
        """A sequence whose anchor has the position `begin`."""
        self.first_rows.append(len(self.tokens))
        self.tokens += [anchor, *draft.tokens]
        self.seq_ids += [seq] * (1 + len(draft))
        if draft.is_chain:
            self.positions += range(begin, begin + 1 + len(draft))
            self.lines.append(None)
        else:
            self.positions += [begin, *(begin + depth for depth in draft.depths)]
            self.lines.append(lines(draft.parents, self._n_branches))

    @property
    def all_lines(self) -> Lines | None:
        """Of all rows; none where no sequence forks."""
        if not any(self.lines):
            return None
        everywhere = list(range(self._n_branches))
        ends = [*self.first_rows[1:], len(self.tokens)]
        return [
            row
            for found, begin, end in zip(self.lines, self.first_rows, ends, strict=True)
            for row in (found or [everywhere] * (end - begin))
        ]
