"""Parts of an answer that were accepted drafts, told while it streams: our addition to a chunk."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dflash_local.origins import Origin, Origins
from dflash_local.result import Chunk


class DraftDetail:
    """Reads the model's chunks, and tells for each piece of shown text whether it was drafted."""

    def __init__(self) -> None:
        self._origins = Origins()
        self._rounds: list[int] = []
        self._copied: list[int] = []
        self._open: list[bool] = []  # accepted drafts of a round whose last token is still to come
        self._begun = False
        self._drafting: str | None = None
        self._warning: str | None = None

    def push(self, chunk: Chunk) -> None:
        """Take in the model's addition."""
        self._origins.add(chunk.pieces)
        for drafted, copied in zip(chunk.from_draft, chunk.from_copy, strict=True):
            self._count(drafted, copied)
        self._drafting = chunk.drafting
        if chunk.result is not None:
            self._warning = chunk.result.stats.warning

    def take(self, shown: str) -> dict[str, Any]:
        """The detail for `shown`, the next text of the message.

        `pieces` join to `shown`. Those that no drafter proposed, as the text had them already, have
        `from_copy`. `rounds` has the number of tokens emitted by each verify pass since the last
        call: accepted drafts and one of the target's own; `copied` the number of copies among these
        drafts. `drafting` is the controller's decision at the moment, and why; None for a fixed
        width.
        """
        detail = {
            "pieces": _pieces(shown, self._origins.of(shown)),
            "rounds": self._rounds,
            "copied": self._copied,
            "drafting": self._drafting,
        }
        self._rounds, self._copied = [], []
        return detail if self._warning is None else {**detail, "warning": self._warning}

    def _count(self, from_draft: bool, from_copy: bool) -> None:
        if from_draft:
            self._open.append(from_copy)
            return
        if self._begun:  # the first token comes from the prompt, and belongs to no round
            self._rounds.append(len(self._open) + 1)
            self._copied.append(sum(self._open))
        self._begun, self._open = True, []


def _pieces(text: str, origins: Sequence[Origin]) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    for (drafted, copied), run in groupby(
        zip(text, origins, strict=True), key=lambda pair: pair[1]
    ):
        pieces.append({"text": "".join(char for char, _ in run), "from_draft": drafted})
        if copied:
            pieces[-1]["from_copy"] = True
    return pieces
