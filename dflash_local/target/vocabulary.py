"""The target's vocabulary: from text to token ids and back, as llama.cpp does it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dflash_local.errors import ClosedError, InputError, PromptTooLongError
from dflash_local.llama import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)

# isort: split
import llama_cpp.llama_cpp as api

_NO_TOKEN = -1
_USUAL_LONGEST = 16
"""Bytes per token that no usual text exceeds. Only longer prompts are checked before they are
tokenised."""


@dataclass(frozen=True)
class InfillTokens:
    """The tokens that mark a gap's prefix, suffix and middle, a repository's name and a file in it.

    The last two are None if the model does not know them.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


class Vocabulary:
    """A `llama_vocab *`, which lives as long as its model. Any thread may convert texts and tokens.

    All methods raise ClosedError once the model is closed.
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
        """Call this before the model is freed. It waits for readers and lets no new ones begin."""
        with self._changed:
            self._pointer = None
            self._changed.wait_for(lambda: not self._readers)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """The `llama_vocab *` for any thread; the model is not freed meanwhile."""
        with self._changed:
            pointer = self.pointer
            self._readers += 1
        try:
            yield pointer
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def tokenize(
        self,
        text: str,
        *,
        special: bool = True,
        add_special: bool = True,
        n_ctx: int | None = None,
    ) -> list[int]:
        """Token ids of `text`.

        With `special`, names of special tokens in the text become these tokens. `add_special` adds
        the tokens that the model wants at the start or the end. Raises InputError for text that is
        not UTF-8, and PromptTooLongError for text that cannot fit into `n_ctx` tokens.
        """
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has half a surrogate pair at character {error.start}, "
                "which is not Unicode text; remove it"
            ) from None
        if n_ctx is not None and len(raw) > n_ctx * _USUAL_LONGEST:
            n = len(raw) // self.longest
            if n > n_ctx:
                raise PromptTooLongError(
                    f"the prompt has {len(raw)} bytes, so at least {n} tokens, the context holds "
                    f"{n_ctx}; shorten the prompt or load with a larger n_ctx (--ctx)",
                    n,
                    n_ctx,
                    at_least=True,
                )
        room = len(raw) + 16
        with self.reading() as pointer:
            while True:
                ids = (api.llama_token * room)()
                n = api.llama_tokenize(pointer, raw, len(raw), ids, room, add_special, special)
                if n >= 0:
                    return list(ids[:n])
                room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that `token` adds to a text. Control tokens add nothing or, with `special`,
        their names."""
        return self._piece(token, self._special if special else self._pieces, special=special)

    def name(self, token: int) -> str:
        """The text that `tokenize(special=True)` reads as this token, also for control tokens."""
        return self.piece(token, special=True).decode("utf-8", "replace")

    def _piece(self, token: int, known: dict[int, bytes], *, special: bool) -> bytes:
        piece = known.get(token)
        if piece is None:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < self.n_tokens:
                raise InputError(
                    f"token id {token!r} is not in the vocabulary; "
                    f"expected 0 to {self.n_tokens - 1}"
                )
            room = 64
            with self.reading() as pointer:
                while True:
                    buffer = ctypes.create_string_buffer(room)
                    n = api.llama_token_to_piece(pointer, token, buffer, room, 0, special)
                    if n >= 0:
                        break
                    room = -n
            piece = known[token] = buffer.raw[:n]
        return piece

    def is_token(self, name: str) -> bool:
        """Whether `name` is the name of a single control or user-defined token."""
        ids = self.tokenize(name, special=True, add_special=False)
        if len(ids) != 1 or self.name(ids[0]) != name:
            return False
        marked = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_USER_DEFINED
        with self.reading() as pointer:
            return bool(api.llama_vocab_get_attr(pointer, ids[0]) & marked)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`. Bytes that are not UTF-8 become U+FFFD. Control tokens are left out or,
        with `special`, written as their names."""
        with self.reading():
            pieces = [self.piece(token, special=special) for token in tokens]
        return b"".join(pieces).decode("utf-8", "replace")

    def ends_text(self, token: int) -> bool:
        """Whether generation ends with this token (any of the model's end-of-text tokens)."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(api.llama_vocab_is_eog(self.pointer, token))
        return known

    @cached_property
    def ends(self) -> list[int]:
        """All end-of-text tokens."""
        with self.reading() as pointer:
            return [t for t in range(self.n_tokens) if api.llama_vocab_is_eog(pointer, t)]

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token. A text has at least its bytes divided by this many tokens."""
        return max(len(self.piece(token, special=True)) for token in range(self.n_tokens))

    @property
    def bos(self) -> str:
        with self.reading() as pointer:
            return self._optional(api.llama_vocab_bos(pointer))

    @property
    def eos(self) -> str:
        with self.reading() as pointer:
            return self._optional(api.llama_vocab_eos(pointer))

    @property
    def infill(self) -> InfillTokens | None:
        """The tokens for filling a gap in a text; None if the model has none.

        llama.cpp takes them from the file's metadata, or knows them by their names.
        """
        with self.reading() as pointer:
            prefix = api.llama_vocab_fim_pre(pointer)
            suffix = api.llama_vocab_fim_suf(pointer)
            middle = api.llama_vocab_fim_mid(pointer)
            repository = api.llama_vocab_fim_rep(pointer)
            file = api.llama_vocab_fim_sep(pointer)
        if _NO_TOKEN in (prefix, suffix, middle):
            return None
        return InfillTokens(
            prefix,
            suffix,
            middle,
            None if repository == _NO_TOKEN else repository,
            None if file == _NO_TOKEN else file,
        )

    def _optional(self, token: int) -> str:
        return "" if token == _NO_TOKEN else self.name(token)
