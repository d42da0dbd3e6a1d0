"""Which parts of an answer were accepted drafts, told while it streams: our addition to a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dflash_local.chat.origins import Origin, Origins
from dflash_local.result import Chunk


class DraftDetail:
    """Reads the model's chunks, and tells for each piece of shown text whether it was drafted."""

    def __init__(self) -> None:
        self._origins = Origins()
        self._rounds: list[int] = []
        self._n_open = 0  # accepted drafts of a round whose last token is still to come
        self._begun = False
        self._drafting: str | None = None
        self._warning: str | None = None

    def push(self, chunk: Chunk) -> None:
        """Take in what the model has added."""
        self._origins.add(chunk.pieces)
        for drafted in chunk.from_draft:
            self._count(drafted)
        self._drafting = chunk.drafting
        if chunk.result is not None:
            self._warning = chunk.result.stats.warning

    def take(self, shown: str) -> dict[str, Any]:
        """What to tell with `shown`, the next text of the message.

        `pieces` join to `shown`. Those that no drafter proposed, as the text had them already, have
        `from_copy`. `rounds` has for each verify pass since the last call how many
        tokens it emitted: accepted drafts and one of the target's own. `drafting` is what the
        controller decides at the moment, and why; None for a fixed width.
        """
        detail = {
            "pieces": _pieces(shown, self._origins.of(shown)),
            "rounds": self._rounds,
            "drafting": self._drafting,
        }
        self._rounds = []
        return detail if self._warning is None else {**detail, "warning": self._warning}

    def _count(self, from_draft: bool) -> None:
        if from_draft:
            self._n_open += 1
            return
        if self._begun:  # the first token comes from the prompt, and belongs to no round
            self._rounds.append(self._n_open + 1)
        self._begun, self._n_open = True, 0


def _pieces(text: str, origins: Sequence[Origin]) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    for (drafted, copied), run in groupby(
        zip(text, origins, strict=True), key=lambda pair: pair[1]
    ):
        pieces.append({"text": "".join(char for char, _ in run), "from_draft": drafted})
        if copied:
            pieces[-1]["from_copy"] = True
    return pieces
