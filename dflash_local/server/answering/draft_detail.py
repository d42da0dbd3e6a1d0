"""Which parts of an answer were accepted drafts, told while it streams: our addition to a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dflash_local.result import Chunk
from dflash_local.server.answering.token_logprobs import TokenSpans
from dflash_local.target.vocabulary import Vocabulary


class DraftDetail:
    """Reads the model's chunks, and tells for each piece of shown text whether it was drafted.

    A character belongs to the token that completes it. The shown text may lag behind the tokens,
    and may lack parts that do not belong to the message, such as the marks around reasoning.
    """

    def __init__(self, vocabulary: Vocabulary, *, special: bool = False) -> None:
        self._spans = TokenSpans(vocabulary, special=special)
        self._text = ""  # not yet asked for
        self._marks: list[bool] = []  # of its characters, and of characters still to come
        self._rounds: list[int] = []
        self._n_open = 0  # accepted drafts of a round whose last token is still to come
        self._begun = False
        self._drafting: str | None = None
        self._warning: str | None = None

    def push(self, chunk: Chunk) -> None:
        """Take in what the model has added."""
        self._text += chunk.text
        for token, from_draft in zip(chunk.tokens, chunk.from_draft, strict=True):
            self._marks += [from_draft] * len(self._spans.push(token))
            self._count(from_draft)
        self._drafting = chunk.drafting
        if chunk.result is not None:
            self._warning = chunk.result.stats.warning

    def take(self, shown: str) -> dict[str, Any]:
        """What to tell with `shown`, the next text of the message.

        `pieces` join to `shown`. `rounds` has for each verify pass since the last call how many
        tokens it emitted: accepted drafts and one of the target's own. `drafting` is what the
        controller decides at the moment, and why; None for a fixed width.
        """
        detail = {
            "pieces": _pieces(shown, self._marks_of(shown)),
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

    def _marks_of(self, shown: str) -> list[bool]:
        begin = self._text.find(shown)
        if begin < 0:
            return [False] * len(shown)
        end = begin + len(shown)
        marks = self._marks[begin:end]
        self._text, self._marks = self._text[end:], self._marks[end:]
        return marks + [False] * (len(shown) - len(marks))


def _pieces(text: str, marks: Sequence[bool]) -> list[dict[str, Any]]:
    pieces = []
    for mark, run in groupby(zip(text, marks, strict=True), key=lambda pair: pair[1]):
        pieces.append({"text": "".join(char for char, _ in run), "from_draft": mark})
    return pieces
