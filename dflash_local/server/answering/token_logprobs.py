"""Log-probabilities of an answer's tokens, in step with its text, in OpenAI's two forms."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_local.result import Chunk
from dflash_local.sampling.params import TokenLogprob
from dflash_local.target_model.vocabulary import Vocabulary

_UNLIKELY = -9999.0
"""OpenAI's logarithm of almost nothing; JSON has no infinity."""


PlacedLogprob = tuple[int, TokenLogprob]
"""The character of the answer's text where a token begins, and the token's log-probability."""

WriteLogprobs = Callable[[Vocabulary, Sequence[PlacedLogprob]], dict[str, Any]]
"""Writes `logprobs` of a choice."""


class LogprobStream:
    """Gives tokens only after the text that they begin with has been shown: so neither a stop text
    nor an end of text is among them. `write`: None if they were not asked for."""

    def __init__(self, vocabulary: Vocabulary, write: WriteLogprobs | None) -> None:
        self.vocabulary = vocabulary
        self._write = write
        self._logprobs: list[PlacedLogprob] = []
        self._n_characters = 0
        self._n_shown = 0
        self._n_taken = 0

    def push(self, chunk: Chunk) -> None:
        self._n_characters += len(chunk.text)
        self._logprobs += zip(chunk.starts, chunk.logprobs, strict=False)
        for offset, _ in self._logprobs[self._n_shown :]:
            if offset >= self._n_characters:
                break
            self._n_shown += 1

    def take(self) -> dict[str, Any] | None:
        """Those of the tokens since the last call; None if there are none, or if not asked for."""
        new = self._logprobs[self._n_taken : self._n_shown]
        self._n_taken = self._n_shown
        return self._write(self.vocabulary, new) if self._write and new else None

    def all(self) -> dict[str, Any] | None:
        """Those of all tokens whose text has begun; None if not asked for."""
        shown = self._logprobs[: self._n_shown]
        return self._write(self.vocabulary, shown) if self._write else None


def chat_logprobs(vocabulary: Vocabulary, placed: Sequence[PlacedLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token, special=True)
        return {"token": _text(piece), "logprob": max(logprob, _UNLIKELY), "bytes": list(piece)}

    content = [
        entry(each.token, each.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in each.top]}
        for _, each in placed
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(vocabulary: Vocabulary, placed: Sequence[PlacedLogprob]) -> dict[str, Any]:
    """`logprobs` of a completion's choice. Each token is among the likeliest of its place, whether
    it is one of them or not."""
    tops: list[dict[str, float]] = []
    for _, each in placed:
        top: dict[str, float] = {}
        for token, logprob in (*each.top, (each.token, each.logprob)):
            text = _text(vocabulary.piece(token, special=True))
            top[text] = max(logprob, top.get(text, _UNLIKELY))
        tops.append(top)
    return {
        "tokens": [_text(vocabulary.piece(each.token, special=True)) for _, each in placed],
        "token_logprobs": [max(each.logprob, _UNLIKELY) for _, each in placed],
        "top_logprobs": tops,
        "text_offset": [offset for offset, _ in placed],
    }


def with_prompt(
    vocabulary: Vocabulary,
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    answer: Mapping[str, Any],
    n_characters: int,
) -> dict[str, Any]:
    """`completion_logprobs` of a prompt, which the choice's text begins with so many characters of,
    and of its answer. The first token has none."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    start, placed = 0, []
    for each in (TokenLogprob(prompt[0], 0.0, []), *logprobs):
        placed.append((start, each))
        start += len(decoder.decode(vocabulary.piece(each.token, special=True)))
    told = completion_logprobs(vocabulary, placed)
    told["token_logprobs"][0] = told["top_logprobs"][0] = None
    offsets = [n_characters + offset for offset in answer["text_offset"]]
    return {name: told[name] + {**answer, "text_offset": offsets}[name] for name in told}


def prompt_logprobs(
    vocabulary: Vocabulary, logprobs: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of a prompt the likeliest at its place and itself,
    by their ids. `rank` is None for one that is not among the likeliest; the first has nothing."""
    told: list[dict[str, Any] | None] = [None]
    for each in logprobs:
        ranked = [(token, logprob, i + 1) for i, (token, logprob) in enumerate(each.top)]
        told.append(
            {
                str(token): {
                    "logprob": max(logprob, _UNLIKELY),
                    "rank": rank,
                    "decoded_token": _text(vocabulary.piece(token, special=True)),
                }
                for token, logprob, rank in ((each.token, each.logprob, None), *ranked)
            }
        )
    return told


def _text(piece: bytes) -> str:
    """A token's text; its bytes as OpenAI writes them where it is only a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
