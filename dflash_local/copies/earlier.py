"""Texts of requests that have ended, which later requests of the same owner may copy from."""

from dflash_local.llama import native

MOST_TEXTS = 8
MOST_TOKENS = 65_536
"""Of all texts together: at most 5 MB. To take up the longest takes some 10 ms."""


class EarlierTexts:
    """The latest texts of all owners, each with its index. The oldest make room for new ones."""

    def __init__(self) -> None:
        self._texts: list[tuple[str, native.CopyIndex]] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def n_tokens(self) -> int:
        return sum(len(index) for _, index in self._texts)

    def of(self, owner: str | None) -> list[native.CopyIndex]:
        """The texts of one owner, the latest first; none without an owner."""
        return [index for other, index in reversed(self._texts) if other == owner]

    def keep(self, owner: str, index: native.CopyIndex) -> None:
        """Keep a text. It replaces those of its owner that it goes on with, as the next turn of a
        conversation does. One that is too long is not kept."""
        if len(index) > MOST_TOKENS:
            return
        kept = [(o, text) for o, text in self._texts if o != owner or not index.begins_with(text)]
        self._texts = [*kept, (owner, index)]
        while len(self._texts) > MOST_TEXTS or self.n_tokens > MOST_TOKENS:
            del self._texts[0]
