"""The settings for choosing a token, and the checks of their ranges."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_local.errors import GrammarError, InputError
from dflash_local.sampling.thinking import ThinkingBudget

_MAX_INT = 2**31 - 1
RANDOM_SEED = 2**32 - 1  # LLAMA_DEFAULT_SEED: makes llama.cpp draw a seed of its own
_COLDEST = 1e-5  # below it, logits divided by the temperature exceed float32


@dataclass(frozen=True)
class SamplingParams:
    """The settings of a token's choice.

    `temperature` 0 takes the likeliest token (of equal ones the CPU takes the lowest id). `top_k`
    0, `top_p` 1, `min_p` 0, `repeat_penalty` 1 and the other penalties 0 switch a sampler off.
    `repeat_last_n` is the reach of penalties, in tokens back: 0 not at all, -1 the whole context.
    `dry_multiplier` above 0 penalises tokens that would continue a repetition longer than
    `dry_allowed_length`, by multiplier * base ** (length - allowed), within `dry_penalty_last_n`
    tokens and up to one of `dry_sequence_breakers`. `top_n_sigma` above 0 keeps logits within so
    many standard deviations of the largest; `typical_p` below 1 keeps tokens of typical
    information; `xtc_probability` is the chance that all but the last of the tokens above
    `xtc_threshold` are left out; `dynatemp_range` lets the temperature vary by so much with the
    entropy. At temperature 0 only bias, penalties, DRY and grammar count. `seed` None draws one.
    `logit_bias` is added to the logits of its token ids; -inf forbids a token. `logprobs` is the
    number of alternatives to report with each token; None reports no log-probabilities at all. No
    end of text is drawn before `min_tokens` tokens. `stop_token_ids` end the answer as an end of
    text does. `thinking_budget` limits thoughts.

    At most one of three grammars may bind the answer: `grammar` is GBNF text with a rule `root`;
    `json_schema` is a JSON schema, or True for any JSON object; `lark` is a grammar in the Lark
    syntax of llguidance.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None
    json_schema: Mapping[str, Any] | bool | None = None
    lark: str | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    thinking_budget: ThinkingBudget | None = None

    @property
    def bound(self) -> bool:
        """Whether a grammar of any kind binds the answer."""
        return (self.grammar, self.json_schema, self.lark) != (None, None, None)

    @property
    def greedy(self) -> bool:
        return self.temperature < _COLDEST

    @property
    def penalises(self) -> bool:
        neutral = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        return self.repeat_last_n != 0 and not neutral

    @property
    def is_dry(self) -> bool:
        """Whether repetitions are penalised by their length."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def draws_from_all(self) -> bool:
        """Whether every token may be drawn, by its probability at a fixed temperature."""
        cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1
        bent = self.top_n_sigma > 0 or self.xtc_probability > 0 or self.dynatemp_range > 0
        return not (self.greedy or cut or bent)

    def validate(self, n_vocab: int) -> None:
        """Raises InputError, which names the first value that is out of its range."""
        _number("temperature", self.temperature, 0, 100, "0 takes the likeliest token")
        _integer("top_k", self.top_k, 0, _MAX_INT, "0 is off")
        _number("top_p", self.top_p, 0, 1, "1 is off", above=True)
        _number("min_p", self.min_p, 0, 1, "0 is off")
        _number("repeat_penalty", self.repeat_penalty, 0.01, 100, "1 is off")
        _integer("repeat_last_n", self.repeat_last_n, -1, _MAX_INT, "-1 is the whole context")
        _number("presence_penalty", self.presence_penalty, -100, 100, "0 is off")
        _number("frequency_penalty", self.frequency_penalty, -100, 100, "0 is off")
        _number("dry_multiplier", self.dry_multiplier, 0, 100, "0 is off")
        _number("dry_base", self.dry_base, 1, 100, "1.75 is usual")
        _integer("dry_allowed_length", self.dry_allowed_length, 0, _MAX_INT, "2 is usual")
        _integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, _MAX_INT, "0 is off")
        breakers = self.dry_sequence_breakers
        texts = not isinstance(breakers, str) and isinstance(breakers, Sequence)
        if not texts or not all(_is_breaker(text) for text in breakers) or len(breakers) > 16:
            raise InputError(
                f"dry_sequence_breakers are {reprlib.repr(breakers)}; give at most 16 texts of 1 "
                "to 40 bytes, in a list"
            )
        _number("top_n_sigma", self.top_n_sigma, -1, 100, "-1 is off")
        _number("typical_p", self.typical_p, 0, 1, "1 is off", above=True)
        _number("xtc_probability", self.xtc_probability, 0, 1, "0 is off")
        _number("xtc_threshold", self.xtc_threshold, 0, 1, "above 0.5 is off")
        _number("dynatemp_range", self.dynatemp_range, 0, 100, "0 is off")
        _number("dynatemp_exponent", self.dynatemp_exponent, 0, 100, "1 is usual")
        if self.seed is not None:
            _integer("seed", self.seed, 0, RANDOM_SEED - 1, "leave it out for a random one")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, n_vocab, "the size of the vocabulary")
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(
                f"logit_bias is {self.logit_bias!r}; give a mapping of token ids to numbers"
            )
        for token, bias in self.logit_bias.items():
            _integer("a token of logit_bias", token, 0, n_vocab - 1, "the ids of the vocabulary")
            if bias != -math.inf:
                _number(f"logit_bias of token {token}", bias, -1e6, 1e6, "-inf forbids the token")
        _integer("min_tokens", self.min_tokens, 0, _MAX_INT, "0 is off")
        ids: object = self.stop_token_ids
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise InputError(f"stop_token_ids are {reprlib.repr(ids)}; give token ids in a list")
        for token in ids:
            _integer("one of stop_token_ids", token, 0, n_vocab - 1, "the ids of the vocabulary")
        budget: object = self.thinking_budget
        if not (budget is None or isinstance(budget, ThinkingBudget)):
            raise InputError(
                f"thinking_budget is {reprlib.repr(budget)}; give what Model.thinking_budget makes "
                "of a number of tokens, or None"
            )
        if self.min_tokens and self.bound:
            raise InputError("min_tokens and a grammar both say where to end; give one of them")
        self._validate_grammar()

    def _validate_grammar(self) -> None:
        given = [
            name for name in ("grammar", "json_schema", "lark") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} are both given; give at most one of them")
        if self.grammar is not None and not _is_text(self.grammar):
            raise GrammarError(f"grammar is {self.grammar!r}; give GBNF text with a rule `root`")
        if self.lark is not None and not _is_text(self.lark):
            raise GrammarError(f"lark is {self.lark!r}; give a Lark grammar with a rule `start`")
        schema = self.json_schema
        if not (schema is None or schema is True or isinstance(schema, Mapping)):
            raise GrammarError(
                f"json_schema is {reprlib.repr(schema)}; give a schema, an object by its keys, "
                "or True for any JSON object"
            )


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability. `top`: (id, logprob) of the likeliest tokens."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_breaker(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return 0 < len(value.encode("utf-8", "replace")) <= 40 and "\0" not in value


def _number(
    name: str, value: Any, low: float, high: float, hint: str, *, above: bool = False
) -> None:
    """Raises InputError unless `value` is a number from `low` (or `above` it) to `high`."""
    valid = isinstance(value, (int, float, np.integer, np.floating)) and low <= value <= high
    if not valid or isinstance(value, bool) or (above and value == low):
        since = "above" if above else "from"
        raise InputError(f"{name} is {value!r}; give a number {since} {low:g} to {high:g} ({hint})")


def _integer(name: str, value: Any, low: int, high: int, hint: str) -> None:
    valid = isinstance(value, (int, np.integer)) and low <= value <= high
    if not valid or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; give a whole number from {low} to {high} ({hint})")
