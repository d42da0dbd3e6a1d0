"""The target's vocabulary: text to token ids and back, as llama.cpp does it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from dflash_local import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)
from dflash_local.errors import InputError

# isort: split
import llama_cpp.llama_cpp as api

_NO_TOKEN = -1


class Vocabulary:
    """A `llama_vocab *`, which lives as long as its model."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.n_tokens: int = api.llama_vocab_n_tokens(pointer)
        self._pieces: dict[int, bytes] = {}
        self._special: dict[int, bytes] = {}

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
        while True:
            ids = (api.llama_token * room)()
            n = api.llama_tokenize(self.pointer, raw, len(raw), ids, room, add_special, special)
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
            if not 0 <= token < self.n_tokens:
                raise InputError(
                    f"token id {token} is not in the vocabulary; expected 0 to {self.n_tokens - 1}"
                )
            room = 64
            while True:
                buffer = ctypes.create_string_buffer(room)
                n = api.llama_token_to_piece(self.pointer, token, buffer, room, 0, special)
                if n >= 0:
                    break
                room = -n
            piece = known[token] = buffer.raw[:n]
        return piece

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, control tokens left out, bytes that are no UTF-8 as U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def ends_text(self, token: int) -> bool:
        """Whether generation ends with this token (any of the model's end-of-text tokens)."""
        return bool(api.llama_vocab_is_eog(self.pointer, token))

    @property
    def bos(self) -> str:
        return self._optional(api.llama_vocab_bos(self.pointer))

    @property
    def eos(self) -> str:
        return self._optional(api.llama_vocab_eos(self.pointer))

    def _optional(self, token: int) -> str:
        return "" if token == _NO_TOKEN else self.name(token)
