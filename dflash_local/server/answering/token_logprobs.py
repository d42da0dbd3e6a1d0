"""Log-probabilities of an answer's tokens, in step with its text, in OpenAI's two forms."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.result import Chunk
from dflash_local.sampling.params import TokenLogprob
from dflash_local.target.vocabulary import Vocabulary

_UNLIKELY = -9999.0
"""What OpenAI says for the logarithm of almost nothing; JSON has no infinity."""


@dataclass(frozen=True)
class Entry:
    """A token, and at which character of the answer's text it begins."""

    offset: int
    logprob: TokenLogprob


class TokenStarts:
    """Where tokens begin in the text that they make, in characters."""

    def __init__(self, vocabulary: Vocabulary, *, special: bool = False) -> None:
        self._vocabulary = vocabulary
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._n = 0

    def push(self, token: int) -> int:
        """Where `token` begins. One that goes on with a character begins where that does."""
        start = self._n
        piece = self._vocabulary.piece(token, special=self._special)
        self._n += len(self._decoder.decode(piece))
        return start


class LogprobStream:
    """Hands on a token once the text is there that it begins: so none of a stop text, nor an end
    of text, is ever told."""

    def __init__(self, vocabulary: Vocabulary, *, special: bool = False) -> None:
        self._starts = TokenStarts(vocabulary, special=special)
        self._waiting: list[Entry] = []
        self._n_shown = 0

    def push(self, chunk: Chunk) -> None:
        self._n_shown += len(chunk.text)
        for logprob in chunk.logprobs:
            self._waiting.append(Entry(self._starts.push(logprob.token), logprob))

    def take(self) -> list[Entry]:
        """The tokens since the last call whose text has begun."""
        n = sum(entry.offset < self._n_shown for entry in self._waiting)
        ready, self._waiting = self._waiting[:n], self._waiting[n:]
        return ready


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token, special=True)
        return {
            "token": _text(piece),
            "logprob": max(logprob, _UNLIKELY),
            "bytes": list(piece),
        }

    content = [
        told(entry.logprob.token, entry.logprob.logprob)
        | {"top_logprobs": [told(token, logprob) for token, logprob in entry.logprob.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    vocabulary: Vocabulary, entries: Sequence[Entry], *, offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion's choice. `offset` is where the answer begins in what is shown.

    The token itself is among the likeliest of its place, whether it was one of them or not.
    """
    tops: list[dict[str, float]] = []
    for entry in entries:
        top: dict[str, float] = {}
        for token, logprob in (*entry.logprob.top, (entry.logprob.token, entry.logprob.logprob)):
            text = _text(vocabulary.piece(token, special=True))
            top[text] = max(logprob, top.get(text, _UNLIKELY))
        tops.append(top)
    return {
        "tokens": [_text(vocabulary.piece(e.logprob.token, special=True)) for e in entries],
        "token_logprobs": [max(e.logprob.logprob, _UNLIKELY) for e in entries],
        "top_logprobs": tops,
        "text_offset": [offset + e.offset for e in entries],
    }


def _text(piece: bytes) -> str:
    """A token's text; of one that is only a part of a character its bytes, as OpenAI writes it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
