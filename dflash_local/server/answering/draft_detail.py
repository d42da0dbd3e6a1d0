"""Which parts of an answer were accepted drafts, while it streams: our own addition to a chunk."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dflash_local.result import Chunk
from dflash_local.target.vocabulary import Vocabulary


class DraftDetail:
    """Follows the model's chunks, and tells of each piece of text that is shown who wrote it.

    A character is the token's that completes it. What is shown may lag behind the tokens, and may
    lack what is no part of the message, such as the marks around reasoning.
    """

    def __init__(self, vocabulary: Vocabulary, *, special: bool = False) -> None:
        self._vocabulary = vocabulary
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""  # that has not been asked for yet
        self._marks: list[bool] = []  # of its characters, and of those to come
        self._rounds: list[int] = []
        self._n_open = 0  # accepted drafts of a round whose last token is to come
        self._begun = False
        self._drafting: str | None = None
        self._warning: str | None = None

    def push(self, chunk: Chunk) -> None:
        """Take in what the model has added."""
        self._text += chunk.text
        for token, from_draft in zip(chunk.tokens, chunk.from_draft, strict=True):
            piece = self._vocabulary.piece(token, special=self._special)
            self._marks += [from_draft] * len(self._decoder.decode(piece))
            self._count(from_draft)
        self._drafting = chunk.drafting
        if chunk.result is not None:
            self._warning = chunk.result.stats.warning

    def take(self, shown: str) -> dict[str, Any]:
        """`pieces` join to `shown`, the next text of the message; `rounds` are the tokens that each
        verify pass since the last call emitted, accepted drafts and one of the target's own;
        `drafting` is what the controller decides at the moment, and why; None for a fixed width."""
        told = {
            "pieces": _pieces(shown, self._marks_of(shown)),
            "rounds": self._rounds,
            "drafting": self._drafting,
        }
        self._rounds = []
        return told if self._warning is None else {**told, "warning": self._warning}

    def _count(self, from_draft: bool) -> None:
        if from_draft:
            self._n_open += 1
            return
        if self._begun:  # the first token is the prompt's, and in no round
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
