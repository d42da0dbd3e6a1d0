"""The origin of each character of an answer: drafted, or the model's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_local.result import Piece

Origin = tuple[bool, bool]
"""Of a character: whether it was drafted, and whether only the text itself proposed it."""


class Origins:
    """Reads what the model writes, and tells the origins of what is shown of it.

    The shown text may lag behind the model's, and may lack parts that do not belong to the message,
    such as the marks around reasoning.
    """

    def __init__(self) -> None:
        self._text = ""  # not yet asked for
        self._origins: list[Origin] = []  # of its characters

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add the text that the model wrote next."""
        for text, drafted, copied in pieces:
            self._text += text
            self._origins += [(drafted, copied)] * len(text)

    def of(self, shown: str) -> list[Origin]:
        """Of the characters of `shown`, the next text that is shown."""
        begin = self._text.find(shown)
        if begin < 0:
            return [(False, False)] * len(shown)
        end = begin + len(shown)
        found = self._origins[begin:end]
        self._text, self._origins = self._text[end:], self._origins[end:]
        return found
