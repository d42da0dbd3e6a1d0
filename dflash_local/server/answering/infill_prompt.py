"""The prompt for filling a gap in a text, in llama-server's layout: the text before and after the
gap, and in front of both the other texts that the editor sends.

    REPO name  FILE name text  FILE name text ...  FILE name  PREFIX text  SUFFIX text  MIDDLE

For a model without tokens for repository and file, a line of dashes separates the other texts. A
model without tokens for prefix, suffix and middle was never taught to fill a gap: it goes on from
the text before it.

Parts that do not fit are left out. The text around the gap gets at most three quarters of the room,
and at most 2,048 tokens: three quarters of these for the text before it. The other texts get the
rest. None of these shares depends on how long a text is, and the text before the gap loses its
beginning a quarter of its share at a time. So while somebody types, the prompts begin alike, and
most of each is in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from dflash_local.server.answering import bounds
from dflash_local.server.http.errors import bad_request
from dflash_local.target_model.vocabulary import InfillTokens, Vocabulary

T = TypeVar("T", str, list[int])

_MOST_AROUND = 2048  # tokens; llama-server's default for a batch, which is its measure here
_LEAST_ANSWER = 256  # tokens; however long an answer may be, prompts are cut alike, and cached
_REPOSITORY = "myproject\n"  # llama-server's names where the editor sends none
_FILE = "filename\n"
_BETWEEN = "\n\n--- snippet ---\n\n"


class OtherText(BaseModel):
    """A piece of another file, or of another place in the same one."""

    text: bounds.Text
    filename: bounds.Label = "tmp"


@dataclass(frozen=True)
class Gap:
    """`begun` stands in the gap already, between the prefix and the cursor. If not all of
    `others` fit, the first are left out."""

    prefix: str
    suffix: str
    begun: str = ""
    others: Sequence[OtherText] = ()


def infill_tokens(vocabulary: Vocabulary) -> InfillTokens:
    """The marks around a gap. Raises ApiError for a model that has none."""
    marks = vocabulary.infill
    if marks is None:
        raise bad_request(
            "this model has no tokens to fill a gap with; leave out suffix, or take a model that "
            "was taught to, as coders are",
            param="suffix",
        )
    return marks


def infill_room(n_ctx: int, max_tokens: int) -> int:
    """Tokens for a prompt in a context of `n_ctx`, beside an answer of `max_tokens`."""
    return n_ctx - min(max(max_tokens, _LEAST_ANSWER), n_ctx // 2)


def infill_prompt(vocabulary: Vocabulary, gap: Gap, *, room: int) -> list[int]:
    """Token ids, at most `room`."""
    marks = vocabulary.infill
    start = vocabulary.start()
    room = max(room - len(start) - 4, 8)  # the marks, and the last file's
    around = min(_MOST_AROUND, room * 3 // 4)
    # Text beyond that many of the longest tokens cannot fit, and is not tokenised.
    reach = around * vocabulary.longest
    before = plain_tokens(vocabulary, _end_of(gap.prefix + gap.begun, reach))
    others = _other_tokens(vocabulary, gap.others, marks, room - around)
    if marks is None:
        return [*start, *others, *_end_of(before, around)]
    before = _end_of(before, around * 3 // 4)
    after = plain_tokens(vocabulary, gap.suffix[:reach])[: around // 4]
    return [*start, *others, *marks.around(before, after)]


def plain_tokens(vocabulary: Vocabulary, text: str, n_ctx: int | None = None) -> list[int]:
    """Token ids of a piece of code, in which names of special tokens are text like any other."""
    if not text:
        return []
    return vocabulary.tokenize(text, special=False, add_special=False, n_ctx=n_ctx)


def _other_tokens(
    vocabulary: Vocabulary, others: Sequence[OtherText], marks: InfillTokens | None, room: int
) -> list[int]:
    """As many of `others` as fit, counted from the last one; each of them whole."""
    mark = marks.file if marks else None
    head: list[int] = []
    tail: list[int] = []
    if marks and marks.repository is not None:
        head = [marks.repository, *plain_tokens(vocabulary, _REPOSITORY)]
    if mark is not None:
        tail = [mark, *plain_tokens(vocabulary, _FILE)]
    room -= len(head) + len(tail)
    kept: list[list[int]] = []
    for other in reversed(others):
        if len(other.text) > min(room * vocabulary.longest, vocabulary.most_bytes(room)):
            break
        if mark is None:
            tokens = plain_tokens(vocabulary, _BETWEEN + other.text)
        else:
            tokens = [mark, *plain_tokens(vocabulary, f"{other.filename}\n{other.text}")]
        if len(tokens) > room:
            break
        room -= len(tokens)
        kept.append(tokens)
    return [*head, *(token for tokens in reversed(kept) for token in tokens), *tail]


def _end_of(text: T, n: int) -> T:
    """At most the last `n` tokens or characters. The part left out grows by a quarter of `n` at a
    time."""
    over = len(text) - n
    step = max(n // 4, 1)
    return text[-(-over // step) * step :] if over > 0 else text
