"""Grammars for one model's answers: JSON schemas and Lark by llguidance, GBNF by llama.cpp."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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

_MOST_BYTES = 256 << 10  # of a schema or a Lark grammar
_DEEPEST = 64  # brackets inside one another
_MOST_KEPT = 32  # compiled grammars
_MOST_TRIALS = 2  # at once
_LONGEST_TRIAL_S = 10.0
_TRIAL_STACK, _STACK = 32 << 20, 64 << 20  # its parsers recurse, 9 kB for each rule in a rule
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_LAYOUT = {
    # Room for indentation; white space without bounds invites small models to write nothing else.
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    # oneOf is read as anyOf, as elsewhere: that no second one fits is nothing a grammar can say.
    "coerce_one_of": True,
}
_LAUNCH = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "runpy.run_path(sys.argv[2], run_name='__main__')"
)


class Guide:
    """Makes constraints. Any thread may ask.

    What llguidance has not compiled before is first compiled in a child process, which can be
    stopped (some 0.1 s); before the first of all it is shown the vocabulary, for 150,000 tokens
    a second or so.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._trials = threading.BoundedSemaphore(_MOST_TRIALS)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Show llguidance the vocabulary now, if it has not been. That holds up all of Python's
        threads, for 150,000 tokens up to a second, which running streams would notice."""
        self._shown()

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
        source = _source(kind, text)
        matcher = self._known(source)
        if matcher is None:
            with self._trials:
                matcher = self._known(source)  # by whoever asked for it at the same time
                if matcher is None:
                    _try(kind, source)
                    matcher = self._compile(kind, source)
        with self._lock:
            self._compiled[source] = matcher
            self._compiled.move_to_end(source)  # the last used comes last
            while len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        return Matched(self._vocabulary, matcher.deep_copy())

    def _known(self, source: str) -> LLMatcher | None:
        with self._lock:
            return self._compiled.get(source)

    def _compile(self, kind: str, source: str) -> LLMatcher:
        tokenizer = self._shown()
        found: list[LLMatcher] = []

        def compile_it() -> None:
            limits = LLParserLimits(**_LIMITS)
            with self._vocabulary.reading():
                matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
                matcher.compute_bitmask()  # finds out those that allow no text at all
            found.append(matcher)

        _on_a_deep_stack(compile_it)
        matcher = found[0]
        if matcher.is_error():
            raise GrammarError(f"{kind}: {_reason(matcher.get_error())}")
        return matcher

    def _shown(self) -> LLTokenizer:
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
            raise GrammarError(f"the grammar leads nowhere: {_reason(self._matcher.get_error())}")


def _source(kind: str, text: str) -> str:
    """A grammar as llguidance takes it, or GrammarError if it is too large to be tried."""
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"{kind}: {text[error.start]!r} is no character of Unicode") from None
    if n_bytes > _MOST_BYTES:
        raise GrammarError(f"{kind} has {n_bytes} bytes; at most {_MOST_BYTES} are taken")
    if _depth(text) > _DEEPEST:
        raise GrammarError(f"{kind} has more than {_DEEPEST} brackets inside one another")
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=_LAYOUT)  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError(f"{kind}: {_reason(str(error))}") from None


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    try:
        return json.dumps(
            schema if schema and schema is not True else {"type": "object"}, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema cannot be written as JSON: {error}") from None


def _try(kind: str, source: str) -> None:
    """Raise GrammarError unless a child process compiles it in time."""
    request = {"source": source, "limits": _LIMITS, "stack": _TRIAL_STACK}
    child = Path(__file__).with_name("guide_trial.py")
    try:
        run = subprocess.run(
            [sys.executable, "-c", _LAUNCH, json.dumps(sys.path), str(child)],
            input=json.dumps(request),
            capture_output=True,
            encoding="utf-8",
            timeout=_LONGEST_TRIAL_S,
            check=False,
        )
        fault = json.loads(run.stdout)["fault"]
    except subprocess.TimeoutExpired:
        raise GrammarError(
            f"{kind} is not compiled in {_LONGEST_TRIAL_S:.0f} s; simplify it"
        ) from None
    except ValueError:
        raise GrammarError(
            f"{kind} ended the process that compiled it; nest its rules less deeply"
        ) from None
    if fault:
        raise GrammarError(f"{kind}: {_reason(fault)}")


_threads = threading.Lock()


def _on_a_deep_stack(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    with _threads:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


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
    """With llguidance's mark of tokens that are no text: Lark grammars name them, as in
    `<|im_end|>`, and nothing else allows them."""
    attr = api.llama_vocab_get_attr(pointer, token)
    named = piece.startswith(b"<") and piece.endswith(b">")
    special = attr & api.LLAMA_TOKEN_ATTR_CONTROL or api.llama_vocab_is_eog(pointer, token)
    if special or (attr & api.LLAMA_TOKEN_ATTR_USER_DEFINED and named) or not piece:
        return b"\xff" + piece
    return piece


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


def _reason(message: str) -> str:
    """llguidance's own words, in one line."""
    words = " ".join(message.partition("<non-verbose/>")[0].split())
    return textwrap.shorten(words, 300) if words != "NoExtensionBias" else "no text would fit it"
