"""The target's vocabulary: from text to token ids and back, as llama.cpp does it."""

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from dflash_local.errors import ClosedError, ContextFullError, InputError, PromptTooLongError
from dflash_local.llama.runtime import api

_NO_TOKEN = -1
_USUAL_LONGEST = 16
"""Bytes of a token, on average the most; no text is looked at more closely that has fewer."""
_MOST_BYTES = 1 << 20
"""Of a text, however small the context: llama.cpp takes a second for so many blanks, and up to a
kilobyte of memory for each."""
_MOST_NAMES = 1024
"""Names of special tokens in one call: llama.cpp's time grows with their square, 3 ms for these."""
_SLICE = 4 << 10  # characters, which rarely have more names than that
_BLANKS = frozenset(" \t\n\v\f\r")  # C's isspace


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

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """A prompt to fill the gap between two texts."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


class _Names:
    """The texts that llama.cpp reads as one token each, wherever they stand.

    `all`: each with whether its token swallows the blanks behind it.
    """

    def __init__(self, names: Mapping[str, bool]) -> None:
        self.all = names
        self._longest = max(map(len, names), default=0)
        self._lengths: dict[str, set[int]] = {}
        for name in names:
            self._lengths.setdefault(name[:2], set()).add(len(name))
        starts = sorted(map(re.escape, self._lengths), key=len, reverse=True)
        self._starts = re.compile("|".join(starts)) if starts else None

    def are_many(self, text: str) -> bool:
        """Whether there may be more than `_MOST_NAMES` in it."""
        if self._starts is None:
            return False
        return next(islice(self._starts.finditer(text), _MOST_NAMES, None), None) is not None

    def slices(self, text: str) -> Iterator[str]:
        """`text` in parts, each of which is tokenised as within the whole."""
        begin = at = 0
        while at + _SLICE < len(text):
            cut = self._cut(text, at, at + _SLICE)
            if cut is None:
                at += _SLICE
            else:
                yield text[begin:cut]
                begin = at = cut
        yield text[begin:]

    def _cut(self, text: str, begin: int, end: int) -> int | None:
        """The last place between these that is behind a name, where the rest is read as at the
        start of a text."""
        assert self._starts is not None
        for match in reversed(list(self._starts.finditer(text, begin, end))):
            for name in self._at(text, match.start()):
                # Where blanks are swallowed, they may be a part of such a name.
                if self._swallowing and any(map(str.isspace, name)):
                    continue
                cut = match.start() + len(name)
                while self.all[name] and text[cut : cut + 1] in _BLANKS:
                    cut += 1
                if begin < cut < len(text) and self._stands_alone(text, match.start(), cut):
                    return cut
        return None

    @cached_property
    def _swallowing(self) -> bool:
        return any(self.all.values())

    def _stands_alone(self, text: str, begin: int, end: int) -> bool:
        """Whether no name reaches both into this part of `text` and out of it."""
        for at in range(max(begin - self._longest, 0), end):
            for name in self._at(text, at):
                stop = at + len(name)
                if stop > begin and (at < begin or stop > end):
                    return False
        return True

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Begin and end of each name in a text: the first ones, and of those that begin at one
        place the longest."""
        at = 0
        while self._starts is not None and (match := self._starts.search(text, at)):
            begin = match.start()
            length = max(map(len, self._at(text, begin)), default=0)
            if length:
                yield begin, begin + length
            at = begin + max(length, 1)

    def _at(self, text: str, at: int) -> Iterator[str]:
        for start in {text[at : at + 1], text[at : at + 2]}:
            for n in self._lengths.get(start, ()):
                if (name := text[at : at + n]) in self.all:
                    yield name


def _too_long(n_tokens: int, n_ctx: int) -> tuple[str, int, int]:
    """Of PromptTooLongError for a prompt that has at least so many tokens."""
    said = (
        f"the prompt has at least {n_tokens} tokens, the context holds {n_ctx}; "
        "shorten the prompt or load with a larger n_ctx"
    )
    return said, n_tokens, n_ctx


class Vocabulary:
    """A `llama_vocab *`, which lives as long as its model. Any thread may convert texts and tokens.

    All methods raise ClosedError once the model is closed.
    """

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self._readers = 0
        self._changed = threading.Condition()
        self._free: Callable[[], None] | None = None
        self.n_tokens: int = api.llama_vocab_n_tokens(pointer)
        self._pieces: dict[int, bytes] = {}
        self._special: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self._known_names: dict[bool, _Names] = {}

    @property
    def pointer(self) -> Any:
        """The `llama_vocab *`, for the thread that owns the model."""
        if self._pointer is None:
            raise ClosedError("this model is closed; load it again")
        return self._pointer

    def close(self, free: Callable[[], None] | None = None, *, wait: bool = True) -> None:
        """Let no new readers begin, and call `free`, which frees the model, after the last one.

        `wait`: until then. A finalizer cannot: it may run in the midst of a reader.
        """
        with self._changed:
            self._pointer = None
            if wait:
                self._changed.wait_for(lambda: not self._readers)
            elif self._readers:
                self._free = free
                return
        if free is not None:
            free()

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """The `llama_vocab *` for any thread; the model is not freed meanwhile."""
        with self._changed:
            self._readers += 1  # first, as a finalizer may run at any point
        free = None
        try:
            yield self.pointer
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()
                if not self._readers:
                    free, self._free = self._free, None
            if free is not None:
                free()

    def tokenize(
        self, text: str, *, special: bool = True, add_special: bool = True, n_ctx: int | None = None
    ) -> list[int]:
        """Token ids of `text`.

        With `special`, names of special tokens in the text become these tokens. `add_special` adds
        the tokens that the model wants at the start or the end. With `n_ctx` the time and the
        memory that it takes are bounded. Raises InputError for text that is not UTF-8; with `n_ctx`
        PromptTooLongError, as soon as possible, for one of more tokens than that, and
        ContextFullError for one with more than 16 bytes to each of them and a megabyte in all.
        """
        try:
            n_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has half a surrogate pair at character {error.start}, "
                "which is not Unicode text; remove it"
            ) from None
        if n_ctx is not None:
            self._check_length(n_bytes, n_ctx)
        if len(text) <= _MOST_NAMES:
            return self._tokenize(text, special, add_special)
        names = self._names(special)
        if not names.are_many(text):
            return self._tokenize(text, special, add_special)
        start, end = self.edges() if add_special else ([], [])
        tokens = start
        for part in names.slices(text):
            tokens += self._tokenize(part, special, add_special=False)
            if n_ctx is not None and len(tokens) + len(end) > n_ctx:
                raise PromptTooLongError(*_too_long(len(tokens), n_ctx), at_least=True)
        return tokens + end

    def paired(self, first: str, second: str, *, n_ctx: int) -> list[int]:
        """Token ids of two texts as one input, with the tokens before, between and after them that
        the model wants. Raises as `tokenize` with `n_ctx`."""
        one, other = (
            self.tokenize(text, special=False, add_special=False, n_ctx=n_ctx)
            for text in (first, second)
        )
        with self.reading() as pointer:
            eos = api.llama_vocab_eos(pointer)
            sep = api.llama_vocab_sep(pointer)
            start = [api.llama_vocab_bos(pointer)] * api.llama_vocab_get_add_bos(pointer)
            end = [sep if eos == _NO_TOKEN else eos] * api.llama_vocab_get_add_eos(pointer)
            between = [*end, *[sep] * api.llama_vocab_get_add_sep(pointer)]
        pair = [*start, *one, *between, *other, *end]
        return [token for token in pair if token != _NO_TOKEN]

    def control_names(self, text: str) -> Iterator[tuple[int, int]]:
        """Begin and end of each name of a control token in a text."""
        return self._control.spans(text)

    def tokenize_apart(self, text: str, cleaned: Callable[[str], str], *, n_ctx: int) -> list[int]:
        """Token ids of `text`, in which each name of a control token is that token, and the text
        between two of them is always text, once it is `cleaned`. Raises as `tokenize` with
        `n_ctx`."""
        tokens: list[int] = []
        end, name = 0, ""
        for begin, stop in [*self.control_names(text), (len(text), len(text))]:
            between = cleaned(text[end:begin])
            if name and self._control.all[name]:
                between = between.lstrip("".join(_BLANKS))
            name, end = text[begin:stop], stop
            tokens += self.tokenize(between, special=False, add_special=False, n_ctx=n_ctx)
            tokens += self._tokenize(name, special=True, add_special=False)
            if len(tokens) > n_ctx:
                raise PromptTooLongError(*_too_long(len(tokens), n_ctx), at_least=True)
        return tokens

    @cached_property
    def _control(self) -> _Names:
        """Names that are tokens only where control tokens are read."""
        always = self._names(special=False).all
        found = self._names(special=True).all.items()
        return _Names({name: swallows for name, swallows in found if name not in always})

    def most_bytes(self, n_ctx: int) -> int:
        """Of a text that `tokenize` takes with `n_ctx`."""
        return max(n_ctx * _USUAL_LONGEST, _MOST_BYTES)

    def _check_length(self, n_bytes: int, n_ctx: int) -> None:
        if n_bytes <= n_ctx * _USUAL_LONGEST:
            return
        n = n_bytes // self.longest
        if n > n_ctx:
            raise PromptTooLongError(
                f"the prompt has {n_bytes} bytes, so at least {n} tokens, the context holds "
                f"{n_ctx}; shorten the prompt or load with a larger n_ctx",
                n,
                n_ctx,
                at_least=True,
            )
        if n_bytes > self.most_bytes(n_ctx):
            raise ContextFullError(
                f"the prompt has {n_bytes} bytes; with a context of {n_ctx} tokens at most "
                f"{self.most_bytes(n_ctx)} are read; shorten the prompt"
            )

    def _tokenize(self, text: str, special: bool, add_special: bool) -> list[int]:
        raw = text.encode()
        room = len(raw) + 16
        with self.reading() as pointer:
            while True:
                ids = (api.llama_token * room)()
                n = api.llama_tokenize(pointer, raw, len(raw), ids, room, add_special, special)
                if n >= 0:
                    return list(ids[:n])
                room = -n

    def edges(self) -> tuple[list[int], list[int]]:
        """The tokens that the model wants at the start and at the end of a text."""
        edges = self._tokenize("", special=False, add_special=True)
        with self.reading() as pointer:
            n = 1 if len(edges) == 2 or api.llama_vocab_get_add_bos(pointer) else 0
        return edges[:n], edges[n:]

    def start(self) -> list[int]:
        """The tokens that the model wants at the start of any text, without any that end one."""
        start = self.tokenize("")[:1]
        return [token for token in start if not self.ends_text(token)]

    def _names(self, special: bool) -> _Names:
        if special not in self._known_names:
            always = api.LLAMA_TOKEN_ATTR_USER_DEFINED
            only_special = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN
            found: dict[str, bool] = {}
            with self.reading() as pointer:
                for token in range(self.n_tokens):
                    attr = api.llama_vocab_get_attr(pointer, token)
                    if special if attr & only_special else attr & always:
                        name = api.llama_vocab_get_text(pointer, token).decode("utf-8", "replace")
                        found[name] = bool(attr & api.LLAMA_TOKEN_ATTR_RSTRIP)
            found.pop("", None)
            self._known_names[special] = _Names(found)
        return self._known_names[special]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that `token` adds to a text. Control tokens add nothing or, with `special`,
        their names."""
        known = self._special if special else self._pieces
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

    def name(self, token: int) -> str:
        """The text that `tokenize(special=True)` reads as this token, also for control tokens."""
        return self.piece(token, special=True).decode("utf-8", "replace")

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
        """The name of the token that begins a text; empty if there is none."""
        return self._name_of(api.llama_vocab_bos)

    @property
    def eos(self) -> str:
        """The name of the token that ends a text; empty if there is none."""
        return self._name_of(api.llama_vocab_eos)

    @property
    def infill(self) -> InfillTokens | None:
        """The tokens for filling a gap in a text; None if the model has none.

        llama.cpp takes them from the file's metadata, or knows them by their names.
        """
        names = ("pre", "suf", "mid", "rep", "sep")
        with self.reading() as pointer:
            found = [getattr(api, f"llama_vocab_fim_{name}")(pointer) for name in names]
        if _NO_TOKEN in found[:3]:
            return None
        more = (None if token == _NO_TOKEN else token for token in found[3:])
        return InfillTokens(*found[:3], *more)

    def _name_of(self, get: Callable[[Any], int]) -> str:
        with self.reading() as pointer:
            token = get(pointer)
            return "" if token == _NO_TOKEN else self.name(token)
