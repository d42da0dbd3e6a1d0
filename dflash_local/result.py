"""Results of a generation: chunks on the way, and the whole one at the end."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from dflash_local.engine.sequence import FinishReason
from dflash_local.errors import DflashError
from dflash_local.sampling.params import TokenLogprob
from dflash_local.stats import Stats


class Piece(NamedTuple):
    """A part of an answer's text. `from_draft`: it was drafted and accepted. `from_copy`: no
    drafter proposed it, the text had it already. A character belongs to the token that completes
    it."""

    text: str
    from_draft: bool
    from_copy: bool = False


_LONGEST_REPEATED = 100
"""Tokens of the longest passage that is looked for as repeated."""
_REPEATS = 4
"""Times that it must stand at the end: a table or a list of data may have three like rows."""
_LEAST_REPEATED = 48
"""Tokens repeated in all: shorter runs are rules, blanks and dots."""

_LINE = 60
"""The most characters of a text that `repr` shows."""


@dataclass(frozen=True, repr=False)
class Result:
    """A whole answer.

    `tokens` are all emitted tokens, with an end-of-text token and the tokens of a stop string;
    `text` ends before these. `finish_reason`: "stop" (end of text, or the stop string
    `stopped_by`), "length" (`max_tokens`, or the end of the context), "cancelled". `logprobs` has
    an entry per token if they were asked for, and `prompt_logprobs` one per token of the prompt
    after the first. `seed` is the seed that was used. `from_draft` says for each token whether it
    is an accepted draft, and `from_copy` whether it is one that no drafter proposed: the text had
    it already. The texts of `pieces` make up `text`.

    In a chat, `content` is the answer itself, `reasoning` the thoughts before it, and `tool_calls`
    has the calls in OpenAI's shape.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    seed: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    from_copy: list[bool] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    stopped_by: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def repeated(self) -> int:
        """The number of tokens at the end that only repeat those before them; 0 for none."""
        return _repeated(self.tokens)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the conversation to go on."""
        content = self.text if self.content is None else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def __repr__(self) -> str:
        return f"<Result {_shortened(self.text)}, {self._figures}>"

    def _repr_html_(self) -> str:
        """For notebooks: the text with its accepted drafts tinted, and figures below."""
        text = "".join(
            f'<span style="{_TINT}">{html.escape(piece.text)}</span>'
            if piece.from_draft
            else html.escape(piece.text)
            for piece in self.pieces
        )
        return (
            f'<div style="white-space: pre-wrap">{text}</div>'
            f'<div style="opacity: 0.7; font-size: smaller">{html.escape(self._figures)}</div>'
        )

    @property
    def _figures(self) -> str:
        stats = self.stats
        parts = [f"{len(self.tokens)} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
        if stats.drafted:
            parts.append(f"{stats.tokens_per_round:.2f} tokens per round")
        return ", ".join([*parts, self.finish_reason])


_TINT = "background: rgba(58, 157, 116, 0.25); box-shadow: inset 0 -1px rgb(58, 157, 116)"


class PromptProgress(NamedTuple):
    """The part of a prompt that is read: `n_read` of `n` tokens, of which `n_cached` needed no
    computing, in `seconds`."""

    n: int
    n_cached: int
    n_read: int
    seconds: float


@dataclass(frozen=True, repr=False)
class Chunk:
    """One round's addition to an answer.

    `text` may be empty while a character or a stop string is incomplete. `from_draft` says for each
    token whether it is an accepted draft: the target would have written the same token, but needed
    no pass of its own for it. Every pass ends with one token that is not. `from_copy` is as in
    `Result`, and the texts of `pieces` make up `text`. `starts` says for each token where it
    begins, in characters of the answer's text. `drafting` is a line on whether the controller
    drafts at the moment, and why; None if it has nothing to decide. Only the last chunk of a stream
    has a `result`. In a chat, `content` and `reasoning` are the chunk's parts of those of the
    answer. Before the answer, chunks without text have `prompt`, if the request asks for that.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    result: Result | None = None
    from_draft: list[bool] = field(default_factory=list)
    drafting: str | None = None
    from_copy: list[bool] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    prompt: PromptProgress | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.result.finish_reason if self.result else None

    def __repr__(self) -> str:
        last = f", {self.finish_reason}" if self.result else ""
        return f"<Chunk {_shortened(self.text)}, {len(self.tokens)} tokens{last}>"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= _LINE else text[: _LINE - 1] + "…")


def _repeated(tokens: Sequence[int]) -> int:
    end = list(tokens[-_LONGEST_REPEATED * _REPEATS :])
    for period in range(1, min(_LONGEST_REPEATED, len(end) // 2) + 1):
        n = next(
            (n for n in range(len(end) - period) if end[-1 - n] != end[-1 - n - period]),
            len(end) - period,
        )
        if n >= max(_LEAST_REPEATED, (_REPEATS - 1) * period):
            return n
    return 0


def last_result(chunks: Iterable[Chunk]) -> Result:
    """The result of a whole answer. Raises DflashError if the model was closed meanwhile."""
    result = None
    for chunk in chunks:
        result = chunk.result
    if result is None:
        raise DflashError("the model was closed in the middle of this answer")
    return result


@dataclass(frozen=True)
class SlotStatus:
    """One slot: whether a sequence is running in it, and the number of tokens in its caches."""

    id: int
    busy: bool
    n_cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class ModelTotals:
    """A model's counts since it was loaded.

    `requests` is the number of requests that have ended. Tokens, rounds and drafts are counted as
    in `Stats`, running sequences included. `prompt_s` and `decode_s` are sums over requests, which
    may have run at once. `cache_hits` counts prefixes taken from the store. `passes` are the
    target's, `slots_in_passes` the slots that had rows in them, added up.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    emitted: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0
    copied_accepted: int = 0
    position_drafted: tuple[int, ...] = ()
    position_accepted: tuple[int, ...] = ()
    prompt_s: float = 0.0
    decode_s: float = 0.0
    cache_hits: int = 0
    passes: int = 0
    slots_in_passes: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelStatus(ModelTotals):
    """A model at one moment, and its totals.

    `n_busy` sequences are running and `n_waiting` requests wait for a slot. Of `n_ctx` cells,
    `cells_used` hold a token, those of free slots included. `longest` is the most tokens that a
    slot ever had. `cache_bytes` is the size of the store for prefixes that left their slot.
    """

    n_slots: int
    n_busy: int
    n_waiting: int
    slots: tuple[SlotStatus, ...]
    n_ctx: int
    cells_used: int
    longest: int
    cache_bytes: int

    def after(self, past: ModelStatus) -> ModelStatus:
        """This status with totals that include those of `past`, an earlier load of the model."""
        names = [field.name for field in fields(ModelTotals)]
        sums = {name: _sum(getattr(past, name), getattr(self, name)) for name in names}
        return replace(self, **sums)


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(map(sum, zip_longest(a, b, fillvalue=0)))
    return a + b
