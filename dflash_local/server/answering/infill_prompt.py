"""The prompt of a gap in a text, in llama-server's layout: what stands before and after the gap,
and before both what else the editor sent along.

    REPO name  FILE name text  FILE name text ...  FILE name  PREFIX text  SUFFIX text  MIDDLE

A model without tokens for repository and file gets the other texts one after the other, with a
line of dashes between them. A model without those for prefix, suffix and middle was never taught to
fill a gap: it goes on with what stands before it.

What does not fit is left out. The gap's own text has three quarters of the room at most, and at
most 2,048 tokens, the prefix three quarters of these; the other texts have the rest. None of these
shares depends on how long a text is, and a prefix loses its beginning a quarter of its share at a
time: so prompts of somebody who types begin alike, and most of each is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dflash_local.target.vocabulary import InfillTokens, Vocabulary

T = TypeVar("T", str, list[int])

_MOST_LOCAL = 2048  # tokens; llama-server's default for a batch, which is its measure here
_REPOSITORY = "myproject\n"  # llama-server's names where the editor tells none
_FILE = "filename\n"
_BETWEEN = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True)
class OtherText:
    """A piece of another file, or of another place in this one."""

    text: str
    name: str


@dataclass(frozen=True)
class Gap:
    """`begun` is what stands in the gap already, between the prefix and the cursor. `others` begin
    with the one to leave out first."""

    prefix: str
    suffix: str
    begun: str = ""
    others: tuple[OtherText, ...] = ()


def infill_prompt(vocabulary: Vocabulary, gap: Gap, *, room: int) -> list[int]:
    """Token ids of at most `room` tokens, which is what the context holds less the answer."""
    marks = vocabulary.infill
    start = _start(vocabulary)
    room = max(room - len(start) - 4, 8)  # the marks, and the last file's
    local = min(_MOST_LOCAL, room * 3 // 4)
    # What lies further off than that many of the longest tokens need not be tokenised.
    reach = local * vocabulary.longest
    before = _plain(vocabulary, _end_of(gap.prefix + gap.begun, reach))
    others = _other_tokens(vocabulary, gap.others, marks, room - local)
    if marks is None:
        return [*start, *others, *_end_of(before, local)]
    before = _end_of(before, local * 3 // 4)
    after = _plain(vocabulary, gap.suffix[:reach])[: local // 4]
    return [*start, *others, marks.prefix, *before, marks.suffix, *after, marks.middle]


def _other_tokens(
    vocabulary: Vocabulary, others: Sequence[OtherText], marks: InfillTokens | None, room: int
) -> list[int]:
    """As many of `others` as there is room for, the last ones; each of them whole."""
    mark = marks.file if marks else None
    head: list[int] = []
    tail: list[int] = []
    if marks and marks.repository is not None:
        head = [marks.repository, *_plain(vocabulary, _REPOSITORY)]
    if mark is not None:
        tail = [mark, *_plain(vocabulary, _FILE)]
    room -= len(head) + len(tail)
    kept: list[list[int]] = []
    for other in reversed(others):
        if len(other.text) > room * vocabulary.longest:
            break
        if mark is None:
            tokens = _plain(vocabulary, _BETWEEN + other.text)
        else:
            tokens = [mark, *_plain(vocabulary, f"{other.name}\n{other.text}")]
        if len(tokens) > room:
            break
        room -= len(tokens)
        kept.append(tokens)
    return [*head, *(token for tokens in reversed(kept) for token in tokens), *tail]


def _end_of(text: T, n: int) -> T:
    """At most the last `n` tokens or characters; what is left out grows by a quarter of `n` at a
    time."""
    over = len(text) - n
    step = max(n // 4, 1)
    return text[-(-over // step) * step :] if over > 0 else text


def _plain(vocabulary: Vocabulary, text: str) -> list[int]:
    """Names of special tokens in somebody's code are text like any other."""
    return vocabulary.tokenize(text, special=False, add_special=False) if text else []


def _start(vocabulary: Vocabulary) -> list[int]:
    """What the model wants at the start of any text, less what it wants at the end of one."""
    start = vocabulary.tokenize("", add_special=True)[:1]
    return [token for token in start if not vocabulary.ends_text(token)]
