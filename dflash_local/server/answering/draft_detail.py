"""Which parts of an answer were accepted drafts, told while it streams: our addition to a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dflash_local.result import Chunk
from dflash_local.server.answering.token_logprobs import TokenSpans
from dflash_local.target.vocabulary import Vocabulary

_Mark = tuple[bool, bool]
"""Whether a character was drafted, and whether only the text itself proposed it."""
_OWN: _Mark = (False, False)


class DraftDetail:
    """Reads the model's chunks, and tells for each piece of shown text whether it was drafted.

    A character belongs to the token that completes it. The shown text may lag behind the tokens,
    and may lack parts that do not belong to the message, such as the marks around reasoning.
    """

    def __init__(self, vocabulary: Vocabulary, *, special: bool = False) -> None:
        self._spans = TokenSpans(vocabulary, special=special)
        self._text = ""  # not yet asked for
        self._marks: list[_Mark] = []  # of its characters, and of characters still to come
        self._rounds: list[int] = []
        self._n_open = 0  # accepted drafts of a round whose last token is still to come
        self._begun = False
        self._drafting: str | None = None
        self._warning: str | None = None

    def push(self, chunk: Chunk) -> None:
        """Take in what the model has added."""
        self._text += chunk.text
        # A chunk of whoever knows no copies has none.
        copied = chunk.from_copy or [False] * len(chunk.tokens)
        for token, *mark in zip(chunk.tokens, chunk.from_draft, copied, strict=True):
            self._marks += [(mark[0], mark[1])] * len(self._spans.push(token))
            self._count(mark[0])
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

    def _marks_of(self, shown: str) -> list[_Mark]:
        begin = self._text.find(shown)
        if begin < 0:
            return [_OWN] * len(shown)
        end = begin + len(shown)
        marks = self._marks[begin:end]
        self._text, self._marks = self._text[end:], self._marks[end:]
        return marks + [_OWN] * (len(shown) - len(marks))


def _pieces(text: str, marks: Sequence[_Mark]) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    for (drafted, copied), run in groupby(zip(text, marks, strict=True), key=lambda pair: pair[1]):
        pieces.append({"text": "".join(char for char, _ in run), "from_draft": drafted})
        if copied:
            pieces[-1]["from_copy"] = True
    return pieces
