"""Texts that a grammar for llguidance lets through."""

from typing import Any

from llguidance import LLMatcher
from llguidance.llamacpp import lltokenizer_from_vocab

from dflash_local import Model


class Forced:
    """Grammars over the vocabulary of a model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._tokenizer: Any = lltokenizer_from_vocab(model.target.vocabulary.pointer)

    def lets_through(self, grammar: str | None, text: str) -> bool:
        assert grammar is not None
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.model.target.vocabulary.tokenize(text, add_special=False)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
