"""The text of a stream of tokens: only whole characters, and no part of a stop string."""

import codecs
from collections.abc import Callable, Sequence

from dflash_local.chat.parsing.marks import held
from dflash_local.errors import InputError


class TextStream:
    """Turns tokens into text that can be shown at once and never has to be taken back.

    `piece(token)` gives the token's bytes. Bytes that are not UTF-8 become U+FFFD, and so does a
    character that the last token leaves incomplete. Generation ends with the stop string that is
    complete first; if several end at the same character, with the longest. The text is cut before
    it, or after it if it is one of `kept`, which are stop strings, too. Raises InputError for a
    stop string that is empty or not a text.
    """

    def __init__(
        self, piece: Callable[[int], bytes], stop: Sequence[str] = (), kept: Sequence[str] = ()
    ) -> None:
        self._kept = frozenset(kept)
        stop = (*stop, *kept)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"stop is {text!r}; give one or more texts that are not empty")
        self._piece = piece
        self._stop = stop
        self._overlap = max((len(text) for text in stop), default=1) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""  # decoded, not yet taken, and cut before a stop string
        self.stopped_by: str | None = None
        """The stop string that has ended the text."""
        self.ends: list[int] = []
        """For each token: the number of characters complete after it. The text may end earlier,
        before a stop string."""
        self._n = 0

    def push(self, token: int) -> bool:
        """Add a token. True once the text has a stop string; later tokens then change nothing."""
        if self.stopped_by is None:
            text = self._decoder.decode(self._piece(token))
            self._n += len(text)
            self.stopped_by = self._add(text)
        self.ends.append(self._n)
        return self.stopped_by is not None

    def take(self) -> str:
        """The text since the last call, without an end that may become a stop string."""
        ready = len(self._pending)
        if self.stopped_by is None:
            ready -= held(self._pending, self._stop)  # may begin a stop string
        text, self._pending = self._pending[:ready], self._pending[ready:]
        return text

    def finish(self) -> str:
        """The rest of the text, after the last token. A second call returns nothing."""
        if self.stopped_by is None:
            self._add(self._decoder.decode(b"", final=True))  # the text has ended before that
        text, self._pending = self._pending, ""
        return text

    def _add(self, text: str) -> str | None:
        """Add text, and cut it at the first stop string, which is returned."""
        # What could begin a stop string was held back, so none begins before `_pending`. None is
        # wholly in the old part of it either: it would have been found before.
        since = max(0, len(self._pending) - self._overlap)
        self._pending += text
        found = []
        for stop in self._stop:
            start = self._pending.find(stop, since)
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, stop = min(found)
        self._pending = self._pending[: end if stop in self._kept else start]
        return stop
