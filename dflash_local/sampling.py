"""The target's sampler: from a row of logits to the one token that is emitted.

The samplers are llama.cpp's, in its order: bias, penalties, grammar, top-k, top-p, min-p,
temperature, and a draw from a generator that is seeded. Whoever feeds the same rows in the same
order gets the same tokens: the state is a function of the seed, the prompt and the tokens drawn.
"""

from __future__ import annotations

import codecs
import ctypes
import math
import secrets
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)
from dflash_local.errors import BackendError, ClosedError, GrammarError, InputError
from dflash_local.grammar import parse_grammar

# isort: split
import llama_cpp.llama_cpp as api

_MAX_INT = 2**31 - 1
_RANDOM_SEED = 2**32 - 1  # LLAMA_DEFAULT_SEED: llama.cpp would draw a seed of its own
_MOST_CANDIDATES = 256  # beyond, finding them costs as much as handing on all logits
_COLDEST = 1e-5  # below it, logits over temperature leave the range of float32
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token.

    `temperature` 0 takes the likeliest token (of equals, on the CPU, the lowest). `top_k` 0,
    `top_p` 1, `min_p` 0, `repeat_penalty` 1 and the other penalties 0 switch a sampler off.
    `repeat_last_n` is how far back penalties look, in tokens: 0 not at all, -1 the whole context.
    `seed` None draws one. `logit_bias` is added to the logits of its token ids, -inf forbids one.
    `grammar` is GBNF text with a rule `root`. `logprobs` is how many alternatives to report with
    each token; None for no log-probabilities at all.
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
    logprobs: int | None = None

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
        if self.grammar is not None and (
            not isinstance(self.grammar, str) or not self.grammar.strip()
        ):
            raise GrammarError(f"grammar is {self.grammar!r}; give GBNF text with a rule `root`")


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability, and `top`: the likeliest (id, logprob) there."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Sampler:
    """Draws the tokens of one sequence; each draw also moves the state past the drawn token.

    `vocab` is a `llama_vocab *` of `n_vocab` tokens that outlives the sampler; `n_ctx` bounds how
    far back penalties look. Raises InputError for bad parameters, GrammarError for a bad grammar.

    A grammar looks at the drawn token first, and only where it forbids it at the whole vocabulary
    (70 ns per token id on one CPU, so 10 ms for 150,000), from which is then drawn again, as in
    llama.cpp. That moves the random generator twice, in plain and speculative runs alike.
    """

    def __init__(self, params: SamplingParams, vocab: Any, n_vocab: int, *, n_ctx: int) -> None:
        params.validate(n_vocab)
        self.params = params
        self.seed = secrets.randbelow(_RANDOM_SEED) if params.seed is None else int(params.seed)
        self._vocab = vocab
        self._n_vocab = n_vocab
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = np.zeros(n_vocab, dtype=_CANDIDATE)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")

        self._chain: Any = None
        self._grammar: Any = None
        self._penalties: Any = None
        owned: list[Any] = []
        self._finalizer = weakref.finalize(self, _free, owned)
        # At exit it would run while the model's thread may still be drawing a token.
        self._finalizer.atexit = False
        if params.grammar is not None:
            self._grammar = parse_grammar(vocab, params.grammar)
            owned.append(self._grammar)
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
        return self._chain is None and self._grammar is None

    @property
    def n_candidates(self) -> int | None:
        """How many of the largest logits tell each draw, by `sample_from`; None: all are needed."""
        params, most = self.params, self.params.top_k
        bounded = not params.greedy and 1 <= most < min(_MOST_CANDIDATES, self._n_vocab)
        plain = not params.logit_bias and not params.penalises and self._grammar is None
        # One more than are kept shows whether a tie decides which.
        return most + 1 if bounded and plain and params.logprobs is None else None

    def accept_prompt(self, tokens: Iterable[int]) -> None:
        """Show the prompt to the penalties, once, before the first draw. The grammar sees none."""
        self._check_open()
        if self._penalties is not None:
            for token in tokens:
                api.llama_sampler_accept(self._penalties, int(token))

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Draw one token from a row of logits, float32 [n_vocab], which is left as it is.

        Raises BackendError for logits that are not finite numbers, InputError (with a grammar
        GrammarError) where bias and grammar leave no token.
        """
        self._check_row(logits)
        token = self._draw(logits)
        if self._grammar is not None and not self._allows(token):
            token = self._draw_by_grammar(logits)
        self._accept(token)
        return token

    def sample_from(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int | None:
        """`sample`, from the `n_candidates` largest logits alone, the largest first.

        The same token, and the same state afterwards. None, with nothing drawn, where some are
        equal: their order then depends on the logits that are not here.
        """
        self._check_open()
        n = len(ids)
        if not (logits[:-1] > logits[1:]).all():
            return None
        data = self._data[:n]
        data["id"] = ids
        data["logit"] = logits
        array = _candidates(data)
        api.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        self._accept(token)
        return token

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
        """Free llama.cpp's samplers. Safe to call again."""
        self._finalizer()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, logits: NDArray[np.float32]) -> int:
        if self._chain is None:
            token = int(logits.argmax())  # the first of equals, as llama.cpp's greedy sampler
            logit = float(logits[token])
        else:
            self._fill(logits)
            array = _candidates(self._data)
            api.llama_sampler_apply(self._chain, ctypes.byref(array))
            chosen = array.data[array.selected]
            token, logit = int(chosen.id), float(chosen.logit)
        if logit == -math.inf:
            kind = InputError if self._grammar is None else GrammarError
            raise kind(
                "grammar and logit_bias leave no token of the vocabulary; allow at least one"
            )
        return token

    def _draw_by_grammar(self, logits: NDArray[np.float32]) -> int:
        self._fill(logits)
        api.llama_sampler_apply(self._grammar, ctypes.byref(_candidates(self._data)))
        masked = self._data["logit"].copy()
        while not self._allows(token := self._draw(masked)):
            masked[token] = -np.inf  # passed by llama.cpp's check alone
        return token

    def _fill(self, logits: NDArray[np.float32]) -> None:
        self._data["id"] = self._ids
        self._data["logit"] = logits

    def _allows(self, token: int) -> bool:
        """Whether the grammar can accept the token; if it cannot, accepting ends the process.

        Its check takes overlong bytes of U+0000 for the end of a token, where accepting does not,
        so that what cannot be UTF-8 is refused here. So is an end within a character.
        """
        one = np.array([(token, 1.0, 0.0)], dtype=_CANDIDATE)
        api.llama_sampler_apply(self._grammar, ctypes.byref(_candidates(one)))
        if one["logit"][0] == -np.inf:
            return False
        state = self._decoder.getstate()
        try:
            self._decoder.decode(self._piece(token))
        except UnicodeDecodeError:
            return False
        finally:
            self._decoder.setstate(state)
        return True

    def _accept(self, token: int) -> None:
        if self._chain is not None:
            api.llama_sampler_accept(self._chain, token)
        if self._grammar is not None:
            api.llama_sampler_accept(self._grammar, token)
            if not api.llama_vocab_is_eog(self._vocab, token):
                self._decoder.decode(self._piece(token))

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = api.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

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


def _candidates(data: NDArray[Any]) -> api.llama_token_data_array:
    """A view of `data`, of dtype `_CANDIDATE`, as llama.cpp takes it; `data` must outlive it."""
    pointer = ctypes.cast(data.ctypes.data, api.llama_token_data_p)
    return api.llama_token_data_array(pointer, len(data), -1, False)


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
