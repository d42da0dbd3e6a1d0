"""GBNF grammars: what llama.cpp can be given without ending the process, and giving it."""

from __future__ import annotations

import codecs
import ctypes
import re
import weakref
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dflash_local import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)
from dflash_local.errors import GrammarError
from dflash_local.token_data import TOKEN_DATA, token_data_array
from dflash_local.vocabulary import Vocabulary

# isort: split
import llama_cpp.llama_cpp as api

_DEEPEST, _WIDEST = 100, 1_000_000  # of a grammar: llama.cpp recurses, and copies what repeats


class Grammar:
    """A `Constraint` by llama.cpp's grammar sampler.

    `mask` looks at the whole vocabulary: 0.1 to 2 us per token id on one CPU, so up to 0.3 s for
    150,000. llguidance takes less than a thousandth of that for the same grammar in Lark.
    """

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        """GBNF `text` with a rule `root`.

        Raises GrammarError for a grammar that llama.cpp cannot parse, or that it would not survive.
        """
        _check_grammar(text)
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise GrammarError(
                f"grammar: {text[error.start]!r} is no character of Unicode"
            ) from None
        with vocabulary.reading() as pointer:
            sampler = api.llama_sampler_init_grammar(pointer, encoded, b"root")
        if not sampler:
            raise GrammarError("grammar: llama.cpp cannot parse it; it says why on stderr")
        self._hold(vocabulary, sampler)

    def _hold(self, vocabulary: Vocabulary, sampler: Any) -> None:
        self._vocabulary = vocabulary
        self._sampler = sampler
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._finalizer = weakref.finalize(self, api.llama_sampler_free, sampler)
        # At exit it would run while the model's thread may still be drawing a token.
        self._finalizer.atexit = False

    def copy(self) -> Grammar:
        """Another one at the same place."""
        copy = Grammar.__new__(Grammar)
        copy._hold(self._vocabulary, api.llama_sampler_clone(self._sampler))
        copy._decoder.setstate(self._decoder.getstate())
        return copy

    def allows(self, token: int) -> bool:
        """Whether the grammar can accept the token; if it cannot, accepting ends the process.

        llama.cpp's check takes overlong bytes of U+0000 for the end of a token, where accepting
        does not, so that what cannot be UTF-8 is refused here. So is an end within a character.
        """
        one = np.array([(token, 1.0, 0.0)], dtype=TOKEN_DATA)
        api.llama_sampler_apply(self._sampler, ctypes.byref(token_data_array(one)))
        if one["logit"][0] == -np.inf:
            return False
        state = self._decoder.getstate()
        try:
            self._decoder.decode(self._vocabulary.piece(token, special=True))
        except UnicodeDecodeError:
            return False
        finally:
            self._decoder.setstate(state)
        return True

    def mask(self, logits: NDArray[np.float32]) -> None:
        data = np.zeros(len(logits), dtype=TOKEN_DATA)
        data["id"] = np.arange(len(logits), dtype=np.int32)
        data["logit"] = logits
        api.llama_sampler_apply(self._sampler, ctypes.byref(token_data_array(data)))
        logits[:] = data["logit"]

    def accept(self, token: int) -> None:
        api.llama_sampler_accept(self._sampler, token)
        if not self._vocabulary.ends_text(token):
            self._decoder.decode(self._vocabulary.piece(token, special=True))

    def n_valid(self, tokens: Sequence[int]) -> int:
        ahead = self.copy()
        try:
            for n, token in enumerate(tokens):
                if not ahead.allows(token):
                    return n
                if self._vocabulary.ends_text(token):
                    return n + 1
                ahead.accept(token)
            return len(tokens)
        finally:
            ahead.close()

    def close(self) -> None:
        self._finalizer()


_LEXEME = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\r\n]*)+)
      | (?P<define>[A-Za-z0-9-]+[ \t]*::=)
      | (?P<name>[A-Za-z0-9-]+)
      | (?P<text>"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*]|\.)
      | (?P<repeat>[*+?]|\{\s*(?P<low>\d{1,9})\s*(?P<range>,\s*(?P<high>\d{1,9})?\s*)?})
      | (?P<mark>[()|])""",
    re.VERBOSE | re.DOTALL,
)
# Symbols beside the rules that the text names, by names that it cannot give.
_CHARACTER, _NOTHING, _REPEAT = "a character", "no character", "repeat "


def _check_grammar(text: str) -> None:
    """Refuse, by GrammarError, the grammars on which llama.cpp aborts, throws or never returns.

    These hold token references, which its check and its accepting take differently; {m,n} with
    n < m; what is too deep or wide for its recursion; and rules that come back to themselves
    without a character in between, which it does not see behind a rule that may be empty. All
    else is left to its parser.
    """

    def fail(reason: str) -> NoReturn:
        raise GrammarError(f"grammar, line {text.count(chr(10), 0, at) + 1}: {reason}")

    rules: dict[str, list[list[str]]] = {_NOTHING: [[]]}  # of each rule the alternatives' symbols
    nested: list[list[list[str]]] = []  # the rule at hand and the groups that are open in it
    counted: set[str] = set()  # what is repeated a number of times
    at, width, expanded = 0, 0, 0
    while at < len(text):
        match = _LEXEME.match(text, at)
        if match is None or "\0" in match[0]:
            hint = "; tokens as <...> are not supported" if text[at] in "<!" else ""
            fail(f"{text[at : at + 20]!r} is not understood{hint}")
        kind, lexeme = match.lastgroup, match[0]
        if kind == "define":
            if len(nested) > 1:
                fail("a parenthesis of the rule before is not closed")
            nested = [[[]]]
            rules[lexeme[:-3].rstrip()] = nested[0]
        elif kind != "space" and not nested:
            fail(f"{lexeme!r} is in no rule; begin with: root ::= ...")
        elif lexeme == "(":
            nested[-1][-1].append(group := f"group {len(rules)}")
            nested.append(rules.setdefault(group, [[]]))
        elif lexeme == ")" and len(nested) == 1:
            fail("a parenthesis is closed that was not opened")
        elif lexeme == ")":
            nested.pop()
        elif lexeme == "|":
            nested[-1].append([])
        elif kind == "name":
            nested[-1][-1].append(lexeme)
        elif kind == "text":
            width = len(lexeme)
            nested[-1][-1].append(_NOTHING if lexeme in ('""', "[]", "[^]") else _CHARACTER)
        elif kind == "repeat":
            low = int(match["low"] or lexeme == "+")
            high = low if match["low"] and not match["range"] else int(match["high"] or 0)
            unbounded = lexeme in "*+" or (match["range"] and not match["high"]) or high > 2000
            high = max(low, 1) if unbounded else 1 if lexeme == "?" else high
            expanded += width * high
            if high < low or expanded > _WIDEST or not nested[-1][-1]:
                fail(f"{lexeme} repeats nothing, less than its minimum, or too much")
            symbol = nested[-1][-1][-1]
            if high > 1 and not unbounded:
                counted.add(symbol)
            loop = f"{_REPEAT}{len(rules)}"
            rules[loop] = [[symbol, loop] if unbounded else [symbol], []]
            nested[-1][-1][-1:] = [symbol] * (low > 0) + [loop] * (unbounded or high > low)
        if len(nested) > _DEEPEST:
            fail(f"more than {_DEEPEST} parentheses inside one another")
        at = match.end()
    if len(nested) > 1:
        fail("a parenthesis is not closed")
    _check_rules(rules, counted)


def _check_rules(rules: dict[str, list[list[str]]], counted: set[str]) -> None:
    missing = {s for alternatives in rules.values() for a in alternatives for s in a}
    missing = ({"root"} | missing) - rules.keys() - {_CHARACTER}
    if missing:
        raise GrammarError(f"grammar: rule {min(missing)} is used but not defined")
    empty: set[str] = set()  # rules that may be empty
    found = {_NOTHING}
    passes = 0
    while found and passes < _DEEPEST * 4 + 2:  # what needs more is refused below as too deep
        passes += 1
        empty |= found
        found = {
            name
            for name, alternatives in rules.items()
            if name not in empty and any(empty.issuperset(a) for a in alternatives)
        }
    if counted & empty:  # llama.cpp would try all ways of telling which of them are
        raise GrammarError("grammar: {m,n} repeats what may be empty; let it hold a character")
    first: dict[str, list[str]] = {}  # rules that a rule may begin with
    for name, alternatives in rules.items():
        first[name] = []
        for symbols in alternatives:
            reached = next((i for i, s in enumerate(symbols) if s not in empty), len(symbols))
            first[name] += [s for s in symbols[: reached + 1] if s != _CHARACTER]
        if name.startswith(_REPEAT):  # its return to itself is its end, and adds nothing
            first[name] = [s for s in first[name] if s != name]
    try:
        order = list(TopologicalSorter(first).static_order())
    except CycleError as error:
        raise GrammarError(
            f"grammar: {' -> '.join(error.args[1])} comes back to itself with no character in "
            "between; write it without left recursion"
        ) from None
    depth: dict[str, int] = {}
    walks: dict[str, int] = {}
    for name in order:
        depth[name] = 1 + max((depth[s] for s in first[name]), default=0)
        walks[name] = 1 + sum(walks[s] for s in first[name])
        if depth[name] > _DEEPEST * 4 or walks[name] > _WIDEST:
            raise GrammarError(f"grammar: what {name} may begin with is too deep or too manifold")
