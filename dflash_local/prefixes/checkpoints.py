"""The checkpoints of a recurrent state that one slot keeps, and where: before the ends of its last
prompts and, as far as there is room, at boundaries in long ones. Pure: it never looks into a state.
"""

from collections.abc import Iterable, Sequence

from dflash_local.fit.options import CHECKPOINTS
from dflash_local.prefixes.reuse import LEAST_KEPT
from dflash_local.target_model.target import StateCheckpoint

BOUNDARY = 2048
"""Tokens between checkpoints in a long prompt. With fewer, copying states to the host takes a
noticeable part of the time to read a prompt on a GPU; with more, more is read again after a
change."""

_BEFORE_END = 32
"""Tokens between a checkpoint and the end of its prompt: there a template opens the answer, and
perhaps a thought that the next turn leaves out."""


Span = tuple[int, int]
"""The end of an image, and the number of cells it takes beyond its positions."""


class Checkpoints:
    """Those of one slot, by length."""

    def __init__(self, room: int = 0, *, least: int = 1) -> None:
        """`room`: the bytes that those at boundaries may take. Lengths are multiples of `least`."""
        self._room, self._least = room, least
        self._boundary = -(-BOUNDARY // least) * least
        self._state_bytes = 0
        self._at_ends: list[StateCheckpoint] = []
        self._at_boundaries: list[StateCheckpoint] = []

    @property
    def all(self) -> list[StateCheckpoint]:
        """The shortest first."""
        return sorted([*self._at_ends, *self._at_boundaries], key=lambda kept: kept.length)

    @property
    def at_boundaries(self) -> list[StateCheckpoint]:
        return list(self._at_boundaries)

    def longest(self, length: int) -> StateCheckpoint | None:
        """The longest that has at most `length` tokens."""
        return max(
            (kept for kept in self.all if kept.length <= length),
            key=lambda kept: kept.length,
            default=None,
        )

    def wanted(self, n_cached: int, n_prompt: int, images: Sequence[Span] = ()) -> int | None:
        """The next length, from `n_cached` on, at which a slot that reads a prompt is to keep
        one. `images` are those of the prompt: one is computed again if it lies behind the last."""
        lengths = {kept.length for kept in self.all}
        last = max(lengths, default=0)
        end = max(n_prompt - _BEFORE_END, *(span[0] for span in images), 0)
        end -= end % self._least
        n_more = sum(span[1] for span in images if last < span[0] <= end)
        is_far = end > last and end + n_more - last >= LEAST_KEPT
        boundary = max(-(-n_cached // self._boundary), 1) * self._boundary
        boundary += self._boundary * (boundary in lengths)
        if self._state_bytes <= self._room > 0 and boundary + LEAST_KEPT <= end:
            return boundary
        return end if is_far else None

    def keep(self, checkpoint: StateCheckpoint) -> None:
        """Add one, longer than the others, and drop those beyond its room."""
        self._state_bytes = checkpoint.state.nbytes
        if checkpoint.length % self._boundary or self._state_bytes > self._room:
            self._at_ends = [*self._at_ends, checkpoint][-CHECKPOINTS:]
            return
        kept = [*self._at_boundaries, checkpoint]
        while len(kept) * self._state_bytes > self._room:
            # Where the gap that it leaves is smallest. So there are boundaries all along a text.
            bounds = [0, *(each.length for each in kept)]
            gaps = [after - before for before, after in zip(bounds, bounds[2:], strict=False)]
            del kept[gaps.index(min(gaps)) if gaps else 0]
        self._at_boundaries = kept

    def cut(self, length: int) -> None:
        """Forget those of more than `length` tokens."""
        self._at_ends = [kept for kept in self._at_ends if kept.length <= length]
        self._at_boundaries = [kept for kept in self._at_boundaries if kept.length <= length]

    def take(self, others: Iterable[StateCheckpoint]) -> None:
        """Replace all by those of another slot, or of a saved sequence."""
        self.cut(0)
        for checkpoint in sorted(others, key=lambda kept: kept.length):
            self.keep(checkpoint)
