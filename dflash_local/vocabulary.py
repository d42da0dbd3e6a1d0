"""The target's vocabulary: text to token ids and back, as llama.cpp does it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dflash_local import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)
from dflash_local.errors import ClosedError, InputError

# isort: split
import llama_cpp.llama_cpp as api

_NO_TOKEN = -1


class Vocabulary:
    """A `llama_vocab *`, which lives as long as its model. Any thread may read texts and tokens.

    All raise ClosedError once the model is gone.
    """

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self._readers = 0
        self._changed = threading.Condition()
        self.n_tokens: int = api.llama_vocab_n_tokens(pointer)
        self._pieces: dict[int, bytes] = {}
        self._special: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    @property
    def pointer(self) -> Any:
        """The `llama_vocab *`, for the thread that owns the model."""
        if self._pointer is None:
            raise ClosedError("this model is closed; load it again")
        return self._pointer

    def close(self) -> None:
        """Before the model goes: wait for those who read, and let no one begin to."""
        with self._changed:
            self._pointer = None
            self._changed.wait_for(lambda: not self._readers)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._changed:
            pointer = self.pointer
            self._readers += 1
        try:
            yield pointer
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def tokenize(self, text: str, *, special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `special` reads the names of special tokens in the text as these tokens; `add_special` adds
        what the model wants at the start or the end. Raises InputError for text that is not UTF-8.
        """
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has half a surrogate pair at character {error.start}, "
                "which is no Unicode text; remove it"
            ) from None
        room = len(raw) + 16
        with self._reading() as pointer:
            while True:
                ids = (api.llama_token * room)()
                n = api.llama_tokenize(pointer, raw, len(raw), ids, room, add_special, special)
                if n >= 0:
                    return list(ids[:n])
                room = -n

    def piece(self, token: int) -> bytes:
        """The bytes that `token` adds to a text; nothing for control tokens."""
        return self._piece(token, self._pieces, special=False)

    def name(self, token: int) -> str:
        """The token as `tokenize(special=True)` reads it, control tokens too."""
        return self._piece(token, self._special, special=True).decode("utf-8", "replace")

    def _piece(self, token: int, known: dict[int, bytes], *, special: bool) -> bytes:
        piece = known.get(token)
        if piece is None:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < self.n_tokens:
                raise InputError(
                    f"token id {token!r} is not in the vocabulary; "
                    f"expected 0 to {self.n_tokens - 1}"
                )
            room = 64
            with self._reading() as pointer:
                while True:
                    buffer = ctypes.create_string_buffer(room)
                    n = api.llama_token_to_piece(pointer, token, buffer, room, 0, special)
                    if n >= 0:
                        break
                    room = -n
            piece = known[token] = buffer.raw[:n]
        return piece

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, control tokens left out, bytes that are no UTF-8 as U+FFFD."""
        with self._reading():
            return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def ends_text(self, token: int) -> bool:
        """Whether generation ends with this token (any of the model's end-of-text tokens)."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(api.llama_vocab_is_eog(self.pointer, token))
        return known

    @property
    def bos(self) -> str:
        with self._reading() as pointer:
            return self._optional(api.llama_vocab_bos(pointer))

    @property
    def eos(self) -> str:
        with self._reading() as pointer:
            return self._optional(api.llama_vocab_eos(pointer))

    def _optional(self, token: int) -> str:
        return "" if token == _NO_TOKEN else self.name(token)
