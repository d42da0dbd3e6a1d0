"""The target's sampler: from a row of logits to the one token that is emitted.

The samplers are llama.cpp's, in its order: bias, penalties, DRY, grammar, top-n-sigma, top-k,
typical, top-p, min-p, XTC, temperature, and a draw from a generator with a seed. The same rows in
the same order give the same tokens: the state depends only on the seed, the prompt and the drawn
tokens.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.errors import ClosedError, GrammarError, InputError, NotFiniteError
from dflash_local.llama import native
from dflash_local.llama.native import TokenDraw
from dflash_local.llama.runtime import api
from dflash_local.sampling.grammar import Constraint
from dflash_local.sampling.params import RANDOM_SEED, SamplingParams, TokenLogprob
from dflash_local.sampling.thinking import Rule, ThoughtLimit
from dflash_local.target_model.readout import Readout
from dflash_local.target_model.vocabulary import Vocabulary

_MOST_CANDIDATES = 256  # with more, finding them costs as much as fetching all logits
_ABOVE_MIN_P = 64  # usually more than min-p leaves without top-k; if not, all logits are fetched
_NUCLEUS = 128  # the same for top-p
_MAY_FALL = 64  # candidates that penalties may push out: `repeat_last_n` by default
_BIAS = np.dtype([("token", np.int32), ("bias", np.float32)])  # llama_logit_bias
_NOT_FINITE = -1
"""Drawn instead of a token. Other negative numbers: none is left."""


class _NoEnd:
    """A constraint that allows none of `ends` among the first `n` tokens."""

    def __init__(self, n: int, ends: Iterable[int]) -> None:
        self._n_left = n
        self._ends = frozenset(ends)

    def allows(self, token: int) -> bool:
        return self.n_valid((token,)) == 1

    def mask(self, logits: NDArray[np.float32]) -> None:
        logits[list(self._ends)] = -np.inf

    def accept(self, token: int) -> None:
        self._n_left -= 1

    def n_valid(self, tokens: Sequence[int]) -> int:
        early = tokens[: max(self._n_left, 0)]
        return next((i for i, token in enumerate(early) if token in self._ends), len(tokens))


class Sampler:
    """Draws the tokens of one sequence; each draw also moves the state past the drawn token.

    A constraint is first asked about the drawn token alone. Only if it forbids that token, the
    whole vocabulary is masked and a token is drawn again, as in llama.cpp. That moves the random
    generator twice. Plain and speculative runs still agree, as both do it for the same tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        *,
        n_ctx: int,
        constraint: Constraint | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`n_ctx` limits the reach of penalties. `constraint` is for the grammar in `params`, at
        its beginning; None without one. DRY finds its breakers in `vocabulary`, and what is bound
        by a constraint its ends. Raises InputError for bad parameters."""
        params.validate(n_vocab)
        if params.bound != (constraint is not None):
            raise InputError("a sampler takes the constraint of its own grammar, and no other")
        self.params = params
        self.seed = secrets.randbelow(RANDOM_SEED) if params.seed is None else int(params.seed)
        self._n_vocab = n_vocab
        self._vocabulary = vocabulary
        budget = params.thinking_budget
        if (params.is_dry or params.min_tokens or budget) and vocabulary is None:
            raise InputError("dry_multiplier, min_tokens and budgets need the vocabulary; give it")
        self._constraint: Rule | None = constraint
        if params.min_tokens and vocabulary is not None:
            ends = {*vocabulary.ends, *params.stop_token_ids}
            self._constraint = _NoEnd(params.min_tokens, ends)
        if budget and vocabulary is not None:
            piece = partial(vocabulary.piece, special=True)
            self._constraint = ThoughtLimit(budget, piece, self._constraint)
        by_chain = not params.greedy and not params.draws_from_all
        biases = list(self._biases(n_ctx, vocabulary))
        self.n_candidates = self._count_candidates(is_biased=bool(biases))
        """The number of the largest logits that is enough for most draws; None: it takes all."""
        # It frees the chains. Without the last two the likeliest is taken, or any at a temperature.
        self._native: TokenDraw | None = TokenDraw(
            n_vocab,
            _chain(biases),
            _chain(self._filters() if by_chain else ()),
            _chain(self._picks() if by_chain else ()),
            int(params.top_k),
            float(params.top_p),
            float(params.min_p),
            bool(params.typical_p < 1),
            float(max(0.0, *params.logit_bias.values())) if params.logit_bias else 0.0,
            float(params.temperature) if params.draws_from_all else 0.0,
            self.seed,
            self.n_candidates or 0,
            self._constraint is not None,
        )

    @property
    def native(self) -> TokenDraw:
        """It moves its state past the token drawn, if no constraint is to be asked first. Raises
        ClosedError."""
        if self._native is None:
            raise ClosedError("this sampler is closed; make a new one")
        return self._native

    def _biases(self, n_ctx: int, vocabulary: Vocabulary | None) -> Iterator[Any]:
        params = self.params
        if params.logit_bias:
            # All but a few tokens may be forbidden: objects of ctypes would take seconds.
            biases = np.empty(len(params.logit_bias), _BIAS)
            biases["token"] = np.fromiter(params.logit_bias.keys(), np.int32)
            biases["bias"] = np.fromiter(params.logit_bias.values(), np.float32)
            pointer = biases.ctypes.data_as(ctypes.POINTER(api.llama_logit_bias))
            yield api.llama_sampler_init_logit_bias(self._n_vocab, len(biases), pointer)
        if params.penalises:
            # llama.cpp reserves the memory for the whole window at once.
            window = n_ctx if params.repeat_last_n < 0 else min(int(params.repeat_last_n), n_ctx)
            yield api.llama_sampler_init_penalties(
                self._n_vocab,
                window,
                float(params.repeat_penalty),
                float(params.frequency_penalty),
                float(params.presence_penalty),
            )
        if params.is_dry:
            assert vocabulary is not None
            yield self._dry(n_ctx, vocabulary)

    def _filters(self) -> Iterator[Any]:
        params = self.params
        if params.top_n_sigma > 0:
            yield api.llama_sampler_init_top_n_sigma(float(params.top_n_sigma))
        yield api.llama_sampler_init_top_k(int(params.top_k))
        if params.typical_p < 1:
            yield api.llama_sampler_init_typical(float(params.typical_p), 1)
        yield api.llama_sampler_init_top_p(float(params.top_p), 1)

    def _picks(self) -> Iterator[Any]:
        params = self.params
        yield api.llama_sampler_init_min_p(float(params.min_p), 1)
        if params.xtc_probability > 0:
            chance, threshold = float(params.xtc_probability), float(params.xtc_threshold)
            yield api.llama_sampler_init_xtc(chance, threshold, 1, self.seed)
        temperature, varied = float(params.temperature), float(params.dynatemp_range)
        if varied > 0:
            exponent = float(params.dynatemp_exponent)
            yield api.llama_sampler_init_temp_ext(temperature, varied, exponent)
        else:
            yield api.llama_sampler_init_temp(temperature)
        yield api.llama_sampler_init_dist(self.seed)

    def _dry(self, n_ctx: int, vocabulary: Vocabulary) -> Any:
        params = self.params
        window = n_ctx if params.dry_penalty_last_n < 0 else min(params.dry_penalty_last_n, n_ctx)
        breakers = [text.encode("utf-8", "replace") for text in params.dry_sequence_breakers]
        with vocabulary.reading() as pointer:
            return api.llama_sampler_init_dry(
                pointer,
                float(params.dry_multiplier),
                float(params.dry_base),
                int(params.dry_allowed_length),
                int(window),
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )

    def _count_candidates(self, *, is_biased: bool) -> int | None:
        params = self.params
        least = min(params.repeat_penalty - 1, params.presence_penalty, params.frequency_penalty)
        if params.penalises and least < 0:
            return None  # a logit that rises may come from anywhere
        if params.greedy:
            n = 1
        elif params.top_n_sigma > 0:
            return None
        elif 1 <= params.top_k < self._n_vocab:
            n = int(params.top_k)
        elif params.top_k > 0 or params.typical_p < 1:
            return None
        elif params.top_p < 1:
            n = _NUCLEUS
        elif params.min_p > 0:
            n = _ABOVE_MIN_P
        else:
            return None
        if is_biased:
            if params.top_k == 0 and params.top_p < 1 and not params.greedy:
                return None  # it takes the sum of exp over the altered logits
            n += _MAY_FALL
        # One more than are kept shows whether there is a tie for the last place.
        n = max(n, int(params.logprobs or 0)) + 1
        return n if n <= _MOST_CANDIDATES and n < self._n_vocab else None

    @property
    def is_bound(self) -> bool:
        """Whether a constraint is asked about each drawn token."""
        return self._constraint is not None

    def accept_prompt(self, tokens: Iterable[int]) -> None:
        """Show the prompt to the penalties, once, before the first draw. The grammar ignores it."""
        draw = self.native
        if self.params.penalises or self.params.is_dry:
            draw.accept([int(token) for token in tokens])

    def n_valid(self, tokens: Sequence[int]) -> int:
        """The number of these draft tokens that could be emitted one after the other."""
        return len(tokens) if self._constraint is None else self._constraint.n_valid(tokens)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Draw one token from a row of logits, float32 [n_vocab], which is not changed.

        Raises NotFiniteError for logits that are not finite numbers. Raises InputError (with a
        grammar GrammarError) if bias and grammar leave no token.
        """
        self._check_row(logits)
        return self._settle(self.native.from_row(logits), lambda: logits)

    def draw(self, target: Readout, output_row: int) -> int:
        """`sample` from an output row of the target's last pass, of which no more is fetched than
        it takes: mostly a few of the largest logits. The token and the state afterwards are the
        same. Raises as `sample`."""
        token = target.draw(self.native, output_row)
        return self._settle(token, lambda: target.output_logits(output_row))

    def checked(self, drawn: int) -> int:
        """The token that `native` has drawn. Raises as `sample` if that is no token."""
        if drawn >= 0:
            return drawn
        if drawn == _NOT_FINITE:
            raise not_finite()
        kind = InputError if self._constraint is None else GrammarError
        raise kind("grammar and logit_bias leave no token of the vocabulary; allow at least one")

    def logprobs_from(
        self,
        ids: NDArray[np.int32],
        logits: NDArray[np.float32],
        log_sum: float,
        token: int,
        row: Callable[[], NDArray[np.float32]],
    ) -> TokenLogprob:
        """`logprobs`, given the `n_candidates` largest logits, the largest first, and
        log(sum(exp(logits))) of the whole row.

        `row` is called only if they are not among these logits.
        """
        n = self.params.logprobs or 0
        place = np.flatnonzero(ids == token)
        if len(place) == 0 or (n > 0 and logits[n - 1] == logits[-1]):
            return self.logprobs(row(), token)
        top = [
            (int(i), float(logit) - log_sum) for i, logit in zip(ids[:n], logits[:n], strict=True)
        ]
        return TokenLogprob(token, float(logits[place[0]]) - log_sum, top)

    def logprobs(
        self, logits: NDArray[np.float32], token: int, n: int | None = None
    ) -> TokenLogprob:
        """The target's own log-probability of `token`, before bias, penalties and temperature.

        `top` has `n` entries, the likeliest first, equal ones by id; None: `params.logprobs`.
        """
        self._check_row(logits)
        peak = float(logits.max())
        total = peak + math.log(float(np.exp(logits.astype(np.float64) - peak).sum()))
        n = (self.params.logprobs or 0) if n is None else n
        best: list[int] = []
        if n:
            threshold = np.partition(logits, self._n_vocab - n)[self._n_vocab - n]
            ids = np.flatnonzero(logits >= threshold)
            best = ids[np.argsort(-logits[ids], kind="stable")][:n].tolist()
        top = [(i, float(logits[i]) - total) for i in best]
        return TokenLogprob(token, float(logits[token]) - total, top)

    def close(self) -> None:
        """Draw no more; llama.cpp's samplers go with the last draw. Safe to call again."""
        self._native = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, drawn: int, row: Callable[[], NDArray[np.float32]]) -> int:
        """Move the state past the drawn token, or past another token if the constraint forbids it.
        Without a constraint `native` has done so."""
        token, constraint = self.checked(drawn), self._constraint
        if constraint is None:
            return token
        if isinstance(constraint, ThoughtLimit) and constraint.forced is not None:
            token = constraint.forced  # it comes even if `logit_bias` forbids it
        elif not constraint.allows(token):
            masked = row().copy()
            constraint.mask(masked)
            while (token := self.native.from_row(masked)) >= 0 and not constraint.allows(token):
                masked[token] = -np.inf  # the mask missed it
            if token < 0:
                token = self._end(token, masked)
        self.native.accept([token])
        constraint.accept(token)
        return token

    def _end(self, drawn: int, masked: NDArray[np.float32]) -> int:
        """The likeliest end, where no other token is left and the text may end: it comes even if
        `logit_bias` forbids it. Raises as `sample` where it may not."""
        assert self._constraint is not None
        ends = self._vocabulary.ends if self._vocabulary and drawn != _NOT_FINITE else ()
        allowed = [end for end in ends if self._constraint.allows(end)]
        return max(allowed, key=lambda end: float(masked[end])) if allowed else self.checked(drawn)

    def _check_row(self, logits: NDArray[np.float32]) -> None:
        _ = self.native  # raises if it is closed
        if logits.shape != (self._n_vocab,) or logits.dtype != np.float32:
            raise InputError(
                f"a row of logits is {logits.dtype} {logits.shape}; "
                f"expected float32 ({self._n_vocab},)"
            )
        peak = logits.max()
        if not math.isfinite(peak):  # numpy passes a NaN on
            raise not_finite()


def not_finite() -> NotFiniteError:
    return NotFiniteError(
        "the target's logits are not finite numbers; the model file is damaged, or this llama.cpp "
        "computes it wrongly: try flash_attn=False or the CPU"
    )


def _chain(samplers: Iterable[Any]) -> int:
    """The address of a chain of these, which owns them; 0 without any."""
    chain: Any = None
    for sampler in samplers:
        chain = chain or api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(chain, sampler)
    return native.address(chain)
