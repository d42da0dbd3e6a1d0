"""The rows of one pass of the target, and which of them belong to which sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outputs = Literal["all", "none", "last"]
"""The rows of a part whose logits are wanted."""


@dataclass(frozen=True)
class Part:
    """The rows of one sequence in a batch: `n_rows` from `first_row` on, the first at `begin`.

    `parents` is None for rows that follow one another. For a draft tree it has the parents of all
    rows after the first, which is the anchor and has the number -1, as in `Draft.parents`.
    """

    seq: int
    begin: int
    first_row: int
    n_rows: int
    parents: Sequence[int] | None = None


@dataclass
class Batch:
    """The rows of a pass. Row i is `tokens[i]` at `positions[i]` of sequence `seq_ids[i]`.

    `output[i]` says whether its logits are wanted.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    output: list[bool] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> Literal["chain", "tree"]:
        """ "tree" if any part is one: llama.cpp then builds another graph."""
        return "tree" if any(part.parents is not None for part in self.parts) else "chain"

    def add(self, seq: int, begin: int, tokens: Sequence[int], *, outputs: Outputs = "all") -> Part:
        """Add tokens that follow one another from position `begin` on.

        `outputs`: which of their logits are wanted, "all", "none" or those of the "last".
        """
        n = len(tokens)
        return self._add(Part(seq, begin, len(self), n), tokens, range(begin, begin + n), outputs)

    def add_tree(
        self, seq: int, begin: int, anchor: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> Part:
        """Add an anchor at position `begin` and the nodes of a draft tree after it."""
        positions = [begin]
        for parent in parents:
            positions.append(1 + positions[parent + 1])
        part = Part(seq, begin, len(self), 1 + len(tokens), parents)
        return self._add(part, [anchor, *tokens], positions, "all")

    def _add(
        self, part: Part, tokens: Sequence[int], positions: Sequence[int], outputs: Outputs
    ) -> Part:
        n = part.n_rows
        self.tokens += tokens
        self.positions += positions
        self.seq_ids += [part.seq] * n
        self.output += [outputs == "all"] * (n - 1) + [outputs != "none"]
        self.parts.append(part)
        return part
