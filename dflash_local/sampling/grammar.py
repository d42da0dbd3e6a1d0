"""Grammars for a model's answers, by llguidance: JSON schemas, Lark, and GBNF translated to Lark.

A bad grammar can take hours to compile, or crash the process. So each one is first compiled in a
child process with limits (`grammar_child`). The child also translates the text into llguidance's
own form, which may take long, too.
"""

from __future__ import annotations

import ctypes
import json
import re
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from dflash_local.errors import GrammarError
from dflash_local.llama.runtime import api
from dflash_local.sampling.json_schema import enforceable
from dflash_local.sampling.params import SamplingParams
from dflash_local.target_model.vocabulary import Vocabulary
from dflash_local.trial import child

Kind = Literal["grammar", "json_schema", "lark"]

_MOST_BYTES = 256 << 10  # of a grammar's text
_DEEPEST = 64  # brackets inside one another
_MOST_KEPT = 32  # compiled grammars
_MOST_TRIALS = 2  # at once
_LONGEST_TRIAL_S = 10.0
_TRIAL_STACK, _STACK = 32 << 20, 64 << 20  # its parsers recurse and need 9 kB per level
_UNKNOWN_KEYWORDS = "Unimplemented keys:"  # llguidance's words
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}


class Grammars:
    """Makes constraints. Any thread may ask.

    A new grammar takes about 0.1 s more, for the child process. Before the first one, llguidance
    reads the vocabulary: about a second for 150,000 tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._trials = threading.BoundedSemaphore(_MOST_TRIALS)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[Kind, str], LLMatcher] = OrderedDict()

    def prepare(self) -> LLTokenizer:
        """The vocabulary as llguidance has it. At first it is read, which blocks all Python threads
        for up to a second: that would interrupt running answers."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _lltokenizer(self._vocabulary)
            return self._tokenizer

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """A constraint at the beginning of the grammar in `params`; None without one. Raises
        GrammarError."""
        named = _named(params)
        return self._matched(*named) if named else None

    def knows(self, params: SamplingParams) -> bool:
        """Whether `constraint` takes no time. Raises GrammarError for text that is no JSON."""
        named = _named(params)
        return named is None or self._known(*named) is not None

    def _matched(self, kind: Kind, text: str) -> Constraint:
        _check_size(kind, text)
        matcher = self._known(kind, text)
        if matcher is None:
            with self._trials:
                matcher = self._known(kind, text)  # another request may have compiled it meanwhile
                if matcher is None:
                    matcher = self._compile(kind, _tried(kind, text))
        with self._lock:
            self._compiled[kind, text] = matcher
            self._compiled.move_to_end((kind, text))  # the last used comes last
            while len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        return Constraint(self._vocabulary, matcher.deep_copy())

    def _known(self, kind: Kind, text: str) -> LLMatcher | None:
        with self._lock:
            return self._compiled.get((kind, text))

    def _compile(self, kind: Kind, source: str) -> LLMatcher:
        tokenizer = self.prepare()
        found: list[LLMatcher] = []

        def compile_it() -> None:
            limits = LLParserLimits(**_LIMITS)
            with self._vocabulary.reading():
                matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
                matcher.compute_bitmask()  # finds grammars that allow no text at all
            found.append(matcher)

        child.on_deep_stack(compile_it, _STACK)
        matcher = found[0]
        if matcher.is_error():
            raise GrammarError(f"{kind}: {_reason(matcher.get_error())}")
        return matcher


class Constraint:
    """The tokens that may come next in one text. Only `accept` moves it on.

    An end of text is allowed exactly where the text so far may end. After it only further ends are
    allowed. All methods raise GrammarError if following the grammar exceeds its limits.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._bits = np.zeros((vocabulary.n_tokens + 31) // 32, np.uint32)

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        return self.n_valid((token,)) == 1

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Set the logits, float32 [n_vocab], of tokens that may not come next to -inf, in place.

        It may miss a few tokens that `allows` refuses. If only one text can follow, it allows only
        the usual way to write it in tokens.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.unpackbits(self._bits.view(np.uint8), count=len(logits), bitorder="little")
        logits[allowed == 0] = -np.inf

    def accept(self, token: int) -> None:
        """Move past a token that is allowed."""
        self._matcher.consume_token(token)
        self._check()

    def n_valid(self, tokens: Sequence[int]) -> int:
        """The number of `tokens` that may follow one after the other. Nothing follows an end."""
        if self._matcher.is_stopped():
            self._check()
            return 1 if tokens and self._vocabulary.ends_text(tokens[0]) else 0
        n = self._matcher.validate_tokens(list(tokens))
        self._check()
        return n

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar leads nowhere: {_reason(self._matcher.get_error())}")


def _named(params: SamplingParams) -> tuple[Kind, str] | None:
    if params.grammar is not None:
        return "grammar", params.grammar
    if params.json_schema is not None:
        return "json_schema", _schema_text(params.json_schema)
    return None if params.lark is None else ("lark", params.lark)


def _check_size(kind: Kind, text: str) -> None:
    """Raises GrammarError for a text that is too large or nested too deeply."""
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"{kind}: {text[error.start]!r} is not a Unicode character") from None
    if n_bytes > _MOST_BYTES:
        raise GrammarError(f"{kind} has {n_bytes} bytes; at most {_MOST_BYTES} are taken")
    if _depth(text) > _DEEPEST:
        raise GrammarError(f"{kind} has more than {_DEEPEST} brackets inside one another")


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    given = schema if isinstance(schema, Mapping) and schema else {"type": "object"}
    try:
        return json.dumps(enforceable(given), allow_nan=False)
    except GrammarError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema cannot be written as JSON: {error}") from None


def _tried(kind: Kind, text: str) -> str:
    """The grammar in llguidance's own form, after a child process has compiled it in time.

    Raises GrammarError.
    """
    outcome = child.run(
        "dflash_local.sampling.grammar_child",
        {"kind": kind, "text": text, "limits": _LIMITS, "stack": _TRIAL_STACK},
        limit_s=_LONGEST_TRIAL_S,
    )
    if outcome.done:
        return str(outcome.said[-1]["source"])
    if outcome.death:
        raise GrammarError(f"{kind} ended the process that compiled it; nest its rules less deeply")
    if outcome.short:
        raise GrammarError(f"{kind} is not compiled in {_LONGEST_TRIAL_S:.0f} s; simplify it")
    raise GrammarError(f"{kind}: {_reason(outcome.fault)}")


def _lltokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """A vocabulary in llguidance's form, valid while the vocabulary is open."""
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
    """A token's bytes, with llguidance's mark if the token is not text. Lark grammars can name such
    tokens, as in `<|im_end|>`; nothing else allows them."""
    attr = api.llama_vocab_get_attr(pointer, token)
    named = piece.startswith(b"<") and piece.endswith(b">")
    special = attr & api.LLAMA_TOKEN_ATTR_CONTROL or api.llama_vocab_is_eog(pointer, token)
    if special or (attr & api.LLAMA_TOKEN_ATTR_USER_DEFINED and named) or not piece:
        return b"\xff" + piece
    return piece


def _depth(text: str) -> int:
    """The most brackets that are open at once, counting those in strings, too."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(depth - 1, 0)
    return deepest


def _reason(message: str) -> str:
    """llguidance's own message in one line."""
    words = " ".join(message.partition("<non-verbose/>")[0].split())
    if words.startswith(_UNKNOWN_KEYWORDS):
        names = ", ".join(re.findall(r'"([^"]+)"', words))
        return f"{names} cannot be enforced; leave it out, and check the answer"
    if words.startswith("panic:"):
        return "llguidance fails on it; write it in another way"
    return textwrap.shorten(words, 300) if words != "NoExtensionBias" else "no text would fit it"
