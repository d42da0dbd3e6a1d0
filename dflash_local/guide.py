"""Grammars for one model's answers: JSON schemas and Lark by llguidance, GBNF by llama.cpp."""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from dflash_local import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)
from dflash_local.constraint import Constraint
from dflash_local.errors import GrammarError
from dflash_local.grammar import Grammar
from dflash_local.sampling import SamplingParams
from dflash_local.vocabulary import Vocabulary

# isort: split
import llama_cpp.llama_cpp as api

_MOST_BYTES = 256 * 1024  # of a schema or a Lark grammar
_DEEPEST = 48  # objects and lists, or brackets, inside one another: both parsers recurse
_MOST_KEPT = 32  # compiled grammars
# Room for indentation; white space without bounds invites small models to write nothing else.
_WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class Guide:
    """Makes constraints. Any thread may; the first to need llguidance takes a second or so to show
    it a vocabulary of 150,000 tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def check(self, params: SamplingParams) -> None:
        """Compile the grammar that `params` name, if any. Raises GrammarError."""
        constraint = self.constraint(params)
        if constraint is not None:
            constraint.close()

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """A constraint at the beginning of the grammar that `params` name. Raises GrammarError."""
        if params.grammar is not None:
            return Grammar(self._vocabulary, params.grammar)
        if params.json_schema is not None:
            return self._matched("json_schema", _schema_text(params.json_schema))
        if params.lark is not None:
            return self._matched("lark", params.lark)
        return None

    def _matched(self, kind: str, text: str) -> Matched:
        n_bytes = len(text.encode("utf-8", "replace"))
        if n_bytes > _MOST_BYTES:
            raise GrammarError(f"{kind} has {n_bytes} bytes; at most {_MOST_BYTES} are taken")
        if kind == "lark":
            if _depth(text) > _DEEPEST:
                raise GrammarError(f"lark: more than {_DEEPEST} brackets inside one another")
            source = LLMatcher.grammar_from_lark(text)
        else:
            source = LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_pattern": _WHITE_SPACE}
            )
        with self._lock:
            matcher = self._compiled.pop(source, None)
        if matcher is None:
            matcher = self._compile(kind, source)
        with self._lock:
            self._compiled[source] = matcher  # the last used comes last
            while len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        return Matched(self._vocabulary, matcher.deep_copy())

    def _compile(self, kind: str, source: str) -> LLMatcher:
        tokenizer = self._lltokenizer()
        with self._vocabulary.reading():
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(f"{kind}: {_one_line(matcher.get_error())}")
        return matcher

    def _lltokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _lltokenizer(self._vocabulary)
            return self._tokenizer


class Matched:
    """A `Constraint` by llguidance."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._bits = np.zeros((vocabulary.n_tokens + 31) // 32, np.uint32)

    def allows(self, token: int) -> bool:
        return self.n_valid((token,)) == 1

    def mask(self, logits: NDArray[np.float32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.unpackbits(self._bits.view(np.uint8), count=len(logits), bitorder="little")
        logits[allowed == 0] = -np.inf

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def n_valid(self, tokens: Sequence[int]) -> int:
        if self._matcher.is_stopped():
            self._check()
            return 1 if tokens and self._vocabulary.ends_text(tokens[0]) else 0
        n = self._matcher.validate_tokens(list(tokens))
        self._check()
        return n

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"the grammar cannot be followed: {_one_line(self._matcher.get_error())}"
            )


def _lltokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """A vocabulary as llguidance takes it, good as long as the vocabulary is open."""
    with vocabulary.reading() as pointer:
        ids = range(vocabulary.n_tokens)
        ends = [token for token in ids if api.llama_vocab_is_eog(pointer, token)]
        if not ends:
            raise GrammarError("this model has no end-of-text token, so no answer could end")
        tokens = [_marked(pointer, token, vocabulary.piece(token, special=True)) for token in ids]
        tokenizer: LLTokenizer = LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
            tokens=tokens,
            vocab_ptr=pointer,
            tokenize_fptr=ctypes.cast(api._lib.llama_tokenize, ctypes.c_void_p).value,
            eos_token=ends,
        )
    return tokenizer


def _marked(pointer: Any, token: int, piece: bytes) -> bytes:
    """With the mark of llguidance for tokens that are no text: Lark grammars name them, as in
    `<|im_end|>`, and nothing else allows them."""
    attr = api.llama_vocab_get_attr(pointer, token)
    named = piece.startswith(b"<") and piece.endswith(b">")
    special = attr & api.LLAMA_TOKEN_ATTR_CONTROL or api.llama_vocab_is_eog(pointer, token)
    if special or (attr & api.LLAMA_TOKEN_ATTR_USER_DEFINED and named) or not piece:
        return b"\xff" + piece
    return piece


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    if schema is True or not schema:
        schema = {"type": "object"}
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema is no JSON: {error}") from None
    if _depth(text) > _DEEPEST:
        raise GrammarError(
            f"json_schema: more than {_DEEPEST} objects and lists inside one another"
        )
    return text


def _depth(text: str) -> int:
    """The most brackets that are open at once, those in texts too."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(depth - 1, 0)
    return deepest


def _one_line(message: str) -> str:
    return message.partition("\n")[0]
