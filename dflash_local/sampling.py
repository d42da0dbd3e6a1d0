"""The target's sampler: from a row of logits to the one token that is emitted.

The samplers are llama.cpp's, in its order: bias, penalties, grammar, top-k, top-p, min-p,
temperature, and a draw from a generator that is seeded. Whoever feeds the same rows in the same
order gets the same tokens: the state is a function of the seed, the prompt and the tokens drawn.
"""

from __future__ import annotations

import ctypes
import math
import reprlib
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)
from dflash_local.constraint import Constraint
from dflash_local.errors import BackendError, ClosedError, GrammarError, InputError
from dflash_local.token_data import TOKEN_DATA, token_data_array

# isort: split
import llama_cpp.llama_cpp as api

_MAX_INT = 2**31 - 1
_RANDOM_SEED = 2**32 - 1  # LLAMA_DEFAULT_SEED: llama.cpp would draw a seed of its own
_MOST_CANDIDATES = 256  # beyond, finding them costs as much as handing on all logits
_COLDEST = 1e-5  # below it, logits over temperature leave the range of float32


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token.

    `temperature` 0 takes the likeliest token (of equals, on the CPU, the lowest). `top_k` 0,
    `top_p` 1, `min_p` 0, `repeat_penalty` 1 and the other penalties 0 switch a sampler off.
    `repeat_last_n` is how far back penalties look, in tokens: 0 not at all, -1 the whole context.
    `seed` None draws one. `logit_bias` is added to the logits of its token ids, -inf forbids one.
    At most one of three binds the answer: `grammar` is GBNF text with a rule `root`; `json_schema`
    is a JSON schema, True for any JSON object; `lark` is a grammar in the Lark syntax of
    llguidance. `logprobs` is how many alternatives to report with each token; None for no
    log-probabilities at all.
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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None
    json_schema: Mapping[str, Any] | bool | None = None
    lark: str | None = None
    logprobs: int | None = None

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

    def validate(self, n_vocab: int) -> None:
        """Raises InputError naming the first value that is out of its range."""
        _number("temperature", self.temperature, 0, 100, "0 takes the likeliest token")
        _integer("top_k", self.top_k, 0, _MAX_INT, "0 is off")
        _number("top_p", self.top_p, 0, 1, "1 is off", above=True)
        _number("min_p", self.min_p, 0, 1, "0 is off")
        _number("repeat_penalty", self.repeat_penalty, 0.01, 100, "1 is off")
        _integer("repeat_last_n", self.repeat_last_n, -1, _MAX_INT, "-1 is the whole context")
        _number("presence_penalty", self.presence_penalty, -100, 100, "0 is off")
        _number("frequency_penalty", self.frequency_penalty, -100, 100, "0 is off")
        if self.seed is not None:
            _integer("seed", self.seed, 0, _RANDOM_SEED - 1, "leave it out for a random one")
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
    """Natural logarithm of a token's probability, and `top`: the likeliest (id, logprob) there."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Sampler:
    """Draws the tokens of one sequence; each draw also moves the state past the drawn token.

    A constraint is asked about the drawn token first. Only where it forbids that one is the whole
    vocabulary masked and drawn from again, as in llama.cpp. That moves the random generator twice,
    and as it is so of every emitted token, drafted or not, plain and speculative runs agree.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        *,
        n_ctx: int,
        constraint: Constraint | None = None,
    ) -> None:
        """`n_ctx` bounds how far back penalties look. `constraint` is what the parameters' grammar
        asks for, at its beginning, and closed with the sampler. Raises InputError for bad
        parameters."""
        params.validate(n_vocab)
        if params.bound != (constraint is not None):
            raise InputError("a sampler takes the constraint of its own grammar, and no other")
        self.params = params
        self.seed = secrets.randbelow(_RANDOM_SEED) if params.seed is None else int(params.seed)
        self._n_vocab = n_vocab
        self._constraint = constraint
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = np.zeros(n_vocab, dtype=TOKEN_DATA)

        self._chain: Any = None
        self._penalties: Any = None
        owned: list[Any] = []
        self._finalizer = weakref.finalize(self, _free, owned)
        # At exit it would run while the model's thread may still be drawing a token.
        self._finalizer.atexit = False
        if not params.greedy or params.logit_bias or params.penalises:
            self._chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
            owned.append(self._chain)
            self._fill_chain(n_ctx)

    def _fill_chain(self, n_ctx: int) -> None:
        params, chain = self.params, self._chain
        if params.logit_bias:
            biases = (api.llama_logit_bias * len(params.logit_bias))(
                *(api.llama_logit_bias(int(t), float(b)) for t, b in params.logit_bias.items())
            )
            sampler = api.llama_sampler_init_logit_bias(self._n_vocab, len(biases), biases)
            api.llama_sampler_chain_add(chain, sampler)
        if params.penalises:
            # llama.cpp reserves the window's memory at once, so it is not wider than it can be.
            window = n_ctx if params.repeat_last_n < 0 else min(int(params.repeat_last_n), n_ctx)
            self._penalties = api.llama_sampler_init_penalties(
                self._n_vocab,
                window,
                float(params.repeat_penalty),
                float(params.frequency_penalty),
                float(params.presence_penalty),
            )
            api.llama_sampler_chain_add(chain, self._penalties)
        if params.greedy:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
            return
        top_p, min_p, temperature = map(float, (params.top_p, params.min_p, params.temperature))
        for sampler in (
            api.llama_sampler_init_top_k(int(params.top_k)),
            api.llama_sampler_init_top_p(top_p, 1),
            api.llama_sampler_init_min_p(min_p, 1),
            api.llama_sampler_init_temp(temperature),
            api.llama_sampler_init_dist(self.seed),
        ):
            api.llama_sampler_chain_add(chain, sampler)

    @property
    def takes_best(self) -> bool:
        """Whether each draw is the likeliest token of the logits, whatever came before."""
        return self._chain is None and self._constraint is None

    @property
    def begins_with_best(self) -> bool:
        """Whether each draw is the likeliest token if that is allowed: `sample_best` will do."""
        return self._chain is None

    @property
    def n_candidates(self) -> int | None:
        """How many of the largest logits tell each draw, by `sample_from`; None: all are needed."""
        params, most = self.params, self.params.top_k
        bounded = not params.greedy and 1 <= most < min(_MOST_CANDIDATES, self._n_vocab)
        plain = not params.logit_bias and not params.penalises
        # One more than are kept shows whether a tie decides which.
        return most + 1 if bounded and plain and params.logprobs is None else None

    def accept_prompt(self, tokens: Iterable[int]) -> None:
        """Show the prompt to the penalties, once, before the first draw. The grammar sees none."""
        self._check_open()
        if self._penalties is not None:
            for token in tokens:
                api.llama_sampler_accept(self._penalties, int(token))

    def n_valid(self, tokens: Sequence[int]) -> int:
        """How many of these draft tokens could be emitted one after the other."""
        return len(tokens) if self._constraint is None else self._constraint.n_valid(tokens)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Draw one token from a row of logits, float32 [n_vocab], which is left as it is.

        Raises BackendError for logits that are not finite numbers, InputError (with a grammar
        GrammarError) where bias and grammar leave no token.
        """
        self._check_row(logits)
        return self._settle(self._draw(logits), lambda: logits)

    def sample_best(self, best: int, row: Callable[[], NDArray[np.float32]]) -> int:
        """`sample` where `begins_with_best`, from the likeliest token of the row. The row itself is
        asked for only if it has to be looked at."""
        self._check_open()
        return self._settle(best, row)

    def sample_from(
        self,
        ids: NDArray[np.int32],
        logits: NDArray[np.float32],
        row: Callable[[], NDArray[np.float32]],
    ) -> int:
        """`sample`, from the `n_candidates` largest logits of the row, the largest first: the same
        token, and the same state afterwards.

        The row itself is asked for only where the constraint forbids what is drawn, and where some
        of these are equal: their order then depends on the logits that are not here.
        """
        self._check_open()
        n = len(ids)
        if not (logits[:-1] > logits[1:]).all():
            return self.sample(row())
        data = self._data[:n]
        data["id"] = ids
        data["logit"] = logits
        array = token_data_array(data)
        api.llama_sampler_apply(self._chain, ctypes.byref(array))
        return self._settle(int(array.data[array.selected].id), row)

    def logprobs(self, logits: NDArray[np.float32], token: int) -> TokenLogprob:
        """The target's own log-probability of `token`, before bias, penalties and temperature.

        `top` holds `params.logprobs` entries, the likeliest first, lower ids first among equals.
        """
        self._check_row(logits)
        peak = float(logits.max())
        total = peak + math.log(float(np.exp(logits.astype(np.float64) - peak).sum()))
        n = self.params.logprobs or 0
        best: list[int] = []
        if n:
            threshold = np.partition(logits, self._n_vocab - n)[self._n_vocab - n]
            ids = np.flatnonzero(logits >= threshold)
            best = ids[np.argsort(-logits[ids], kind="stable")][:n].tolist()
        top = [(i, float(logits[i]) - total) for i in best]
        return TokenLogprob(token, float(logits[token]) - total, top)

    def close(self) -> None:
        """Free llama.cpp's samplers and the constraint. Safe to call again."""
        self._finalizer()
        if self._constraint is not None:
            self._constraint.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, logits: NDArray[np.float32]) -> int:
        if self._chain is None:
            token = int(logits.argmax())  # the first of equals, as llama.cpp's greedy sampler
            logit = float(logits[token])
        else:
            self._data["id"] = self._ids
            self._data["logit"] = logits
            array = token_data_array(self._data)
            api.llama_sampler_apply(self._chain, ctypes.byref(array))
            chosen = array.data[array.selected]
            token, logit = int(chosen.id), float(chosen.logit)
        if logit == -math.inf:
            kind = InputError if self._constraint is None else GrammarError
            raise kind(
                "grammar and logit_bias leave no token of the vocabulary; allow at least one"
            )
        return token

    def _settle(self, token: int, row: Callable[[], NDArray[np.float32]]) -> int:
        """Past `token`, or past what is drawn in its place if the constraint forbids it."""
        constraint = self._constraint
        if constraint is not None and not constraint.allows(token):
            masked = row().copy()
            constraint.mask(masked)
            while not constraint.allows(token := self._draw(masked)):
                masked[token] = -np.inf  # passed by the mask alone
        if self._chain is not None:
            api.llama_sampler_accept(self._chain, token)
        if constraint is not None:
            constraint.accept(token)
        return token

    def _check_row(self, logits: NDArray[np.float32]) -> None:
        self._check_open()
        if logits.shape != (self._n_vocab,) or logits.dtype != np.float32:
            raise InputError(
                f"a row of logits is {logits.dtype} {logits.shape}; "
                f"expected float32 ({self._n_vocab},)"
            )
        peak = logits.max()
        if not math.isfinite(peak):  # numpy passes a NaN on
            raise not_finite()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this sampler is closed; make a new one")


def not_finite() -> BackendError:
    return BackendError(
        "the target's logits are not finite numbers; the model file is damaged, or this llama.cpp "
        "computes it wrongly: try flash_attn=False or the CPU"
    )


def _free(samplers: list[Any]) -> None:
    while samplers:
        api.llama_sampler_free(samplers.pop())


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _number(
    name: str, value: Any, low: float, high: float, hint: str, *, above: bool = False
) -> None:
    """`value` is a number from `low` (or `above` it) to `high`, or InputError."""
    valid = isinstance(value, (int, float, np.integer, np.floating)) and low <= value <= high
    if not valid or isinstance(value, bool) or (above and value == low):
        since = "above" if above else "from"
        raise InputError(f"{name} is {value!r}; give a number {since} {low:g} to {high:g} ({hint})")


def _integer(name: str, value: Any, low: int, high: int, hint: str) -> None:
    valid = isinstance(value, (int, np.integer)) and low <= value <= high
    if not valid or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; give a whole number from {low} to {high} ({hint})")
