"""A draw from the largest logits of a row is the draw from the whole row, whatever the settings."""

from __future__ import annotations

import ctypes
import math
from contextlib import ExitStack
from typing import Any

import llama_cpp.llama_cpp as api
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from counted_row import CountedRow
from dflash_local.errors import InputError
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler

Logits = NDArray[np.float32]

N_VOCAB = 600
N_ROWS = 8


class Row(CountedRow):
    def largest(self, k: int, rng: np.random.Generator) -> tuple[NDArray[np.int32], Logits]:
        """As a device finds them: of equal ones at the end any, and in order of their ids."""
        mixed = rng.permutation(len(self.logits))
        some = mixed[np.argsort(-self.logits[mixed], kind="stable")][:k]
        ids = some[np.lexsort((some, -self.logits[some]))].astype(np.int32)
        return ids, self.logits[ids]

    @property
    def log_sum(self) -> float:
        logits = self.logits.astype(np.float64)
        return float(logits.max() + np.log(np.exp(logits - logits.max()).sum()))


def samplers(stack: ExitStack, **options: Any) -> tuple[Sampler, Sampler]:
    """Two alike."""
    params = SamplingParams(**{"seed": 7, **options})
    first, second = (stack.enter_context(Sampler(params, N_VOCAB, n_ctx=64)) for _ in range(2))
    return first, second


LIMITS = {
    "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
    "top_k": st.sampled_from([0, 1, 2, 5, 40, 200, 599, 600, 1000]),
    "top_p": st.sampled_from([0.1, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
}
ALTERATIONS = {
    "repeat_penalty": st.sampled_from([1.0, 1.1, 2.0, 0.8]),
    "repeat_last_n": st.sampled_from([-1, 0, 3, 64]),
    "presence_penalty": st.sampled_from([0.0, 0.5, 3.0, -1.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.4, -0.2]),
    "logit_bias": st.dictionaries(
        st.integers(0, N_VOCAB - 1), st.sampled_from([-math.inf, -5.0, 0.0, 2.0, 50.0]), max_size=9
    ),
}
RARE = {
    "top_n_sigma": st.sampled_from([-1.0, 1.0]),
    "typical_p": st.sampled_from([1.0, 0.7]),
    "xtc_probability": st.sampled_from([0.0, 0.5]),
    "dynatemp_range": st.sampled_from([0.0, 0.5]),
    "logprobs": st.sampled_from([None, 0, 3, 20]),
}
OPTIONS = st.fixed_dictionaries(LIMITS, optional=ALTERATIONS | RARE)
ROWS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "spread": st.sampled_from([0.3, 2.0, 8.0]),
        "levels": st.sampled_from([0, 0, 1, 4, 64]),  # to the unit, for ties
        "forbidden": st.sampled_from([0.0, 0.0, 0.5, 0.99]),  # the share of -inf
    }
)


def rows_of(seed: int, spread: float, levels: int, forbidden: float) -> list[Row]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (N_ROWS, N_VOCAB))
    if levels:
        logits = np.round(logits * levels) / levels
    logits[rng.random(logits.shape) < forbidden] = -np.inf
    logits[:, 3] = np.maximum(logits[:, 3], 0)
    return [Row(row) for row in logits.astype(np.float32)]


@settings(deadline=None, max_examples=400)
@given(options=OPTIONS, rows=ROWS, prompt=st.lists(st.integers(0, N_VOCAB - 1), max_size=20))
def test_candidates_draw_what_the_whole_row_draws(
    options: dict[str, Any], rows: dict[str, Any], prompt: list[int]
) -> None:
    rng = np.random.default_rng(rows["seed"])
    with ExitStack() as stack:
        whole, few = samplers(stack, **options)
        for sampler in (whole, few):
            sampler.accept_prompt(prompt)
        k = few.n_candidates
        for row in rows_of(**rows):
            try:
                drawn = whole.sample(row.logits)
            except InputError:
                if k is not None:
                    with pytest.raises(InputError, match="no token"):
                        few.sample_from(*row.largest(k, rng), row, row.log_sum)
                return
            if k is None:
                assert few.sample(row.logits) == drawn
                continue
            ids, logits = row.largest(k, rng)
            assert few.sample_from(ids, logits, row, row.log_sum) == drawn
            if few.params.logprobs is not None:
                told = few.logprobs_from(ids, logits, row.log_sum, drawn, row)
                expected = whole.logprobs(row.logits, drawn)
                assert told.logprob == pytest.approx(expected.logprob)
                assert [i for i, _ in told.top] == [i for i, _ in expected.top]
                assert [p for _, p in told.top] == pytest.approx([p for _, p in expected.top])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 200},
        {"top_k": 0, "top_p": 1.0},
        {"top_k": 0, "top_p": 0.85},
        {"top_k": 0, "top_p": 0.6, "min_p": 0.0, "xtc_probability": 0.5},
        {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": {3: -math.inf, 4: -2.0}},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"logprobs": 20},
        {"logprobs": 0, "temperature": 0.0},
    ],
    ids=str,
)
def test_usual_rows_are_not_fetched(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    with ExitStack() as stack:
        whole, few = samplers(stack, **{"temperature": 0.8, **options})
        assert few.n_candidates is not None
        for row in rows_of(seed=3, spread=3.0, levels=0, forbidden=0.0):
            ids, logits = row.largest(few.n_candidates, rng)
            drawn = few.sample_from(ids, logits, row, row.log_sum)
            if "logprobs" in options:
                few.logprobs_from(ids, logits, row.log_sum, drawn, row)
            assert not row.fetched
            assert whole.sample(row.logits) == drawn


def test_logits_of_sixteen_bits_are_seldom_fetched() -> None:
    """They are often equal, but of a token that is drawn seldom."""
    rng = np.random.default_rng(1)
    rows = [row for i in range(40) for row in rows_of(seed=i, spread=8.0, levels=8, forbidden=0.0)]
    with ExitStack() as stack:
        whole, few = samplers(stack, temperature=0.8, top_k=40)
        n_tied = 0
        for row in rows:
            ids, logits = row.largest(41, rng)
            n_tied += len(set(logits.tolist())) < 41
            assert few.sample_from(ids, logits, row) == whole.sample(row.logits)
    assert n_tied > 0.9 * len(rows)
    assert sum(row.fetched for row in rows) < 0.1 * len(rows)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0, "min_p": 0.0},
        {"top_k": 0, "top_p": 0.9, "presence_penalty": 1.0},
        {"top_k": 0, "top_p": 0.9, "typical_p": 0.5},
        {"top_k": 300},
        {"repeat_penalty": 0.9},
        {"presence_penalty": -0.5},
        {"top_n_sigma": 1.0},
        {"logprobs": 300},
    ],
    ids=str,
)
def test_some_draws_need_all_logits(options: dict[str, Any]) -> None:
    with ExitStack() as stack:
        _, few = samplers(stack, **{"temperature": 0.8, "top_p": 1.0, **options})
        assert few.n_candidates is None


ALL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
TEMPERATURES = st.sampled_from([1e-5, 0.05, 0.7, 1.0, 3.0, 100.0])


def llama_cpp_draws(rows: list[Row], temperature: float, seed: int) -> list[int]:
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for sampler in (
        api.llama_sampler_init_temp(temperature),
        api.llama_sampler_init_dist(seed),
    ):
        api.llama_sampler_chain_add(chain, sampler)
    drawn = []
    for row in rows:
        tokens = (api.llama_token_data * N_VOCAB)(
            *(api.llama_token_data(i, float(x), 0.0) for i, x in enumerate(row.logits))
        )
        array = api.llama_token_data_array(tokens, N_VOCAB, -1, False)
        api.llama_sampler_apply(chain, ctypes.byref(array))
        drawn.append(int(array.data[array.selected].id))
    api.llama_sampler_free(chain)
    return drawn


@settings(deadline=None)
@given(temperature=TEMPERATURES, rows=ROWS, seed=st.integers(0, 2**32 - 2))
def test_draws_from_all_tokens_are_those_of_llama_cpp(
    temperature: float, rows: dict[str, Any], seed: int
) -> None:
    few = rows_of(**rows)
    params = SamplingParams(temperature=temperature, seed=seed, **ALL)
    biased = SamplingParams(temperature=temperature, seed=seed, logit_bias={5: 0.0}, **ALL)
    expected = llama_cpp_draws(few, temperature, seed)
    for given_params in (params, biased):
        with Sampler(given_params, N_VOCAB, n_ctx=64) as sampler:
            assert [sampler.sample(row.logits) for row in few] == expected


def sums_of(row: Row, temperature: float, rng: np.random.Generator) -> Logits:
    """As a device rounds them, a little worse."""
    below = (row.logits - row.logits.max()) / np.float32(temperature)
    sums = np.exp(below).reshape(-1, 20).sum(axis=1, dtype=np.float32)
    return (sums * (1 + rng.normal(0, 1e-6, len(sums)))).astype(np.float32)


def draw_from_sums(sampler: Sampler, row: Row, rng: np.random.Generator) -> int:
    def chunk(index: int) -> Logits:
        return row.logits[index * 20 : (index + 1) * 20]

    sums = sums_of(row, float(sampler.params.temperature), rng)
    return sampler.sample_from_sums(sums, float(row.logits.max()), chunk, row)


@settings(deadline=None)
@given(temperature=TEMPERATURES, rows=ROWS)
def test_sums_of_chunks_draw_what_the_whole_row_draws(
    temperature: float, rows: dict[str, Any]
) -> None:
    rng = np.random.default_rng(rows["seed"])
    with ExitStack() as stack:
        whole, few = samplers(stack, temperature=temperature, **ALL)
        assert few.adds_up
        for row in rows_of(**rows):
            assert draw_from_sums(few, row, rng) == whole.sample(row.logits)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sums_of_chunks_are_enough_for_most_draws(temperature: float) -> None:
    rng = np.random.default_rng(1)
    rows = [row for i in range(50) for row in rows_of(seed=i, spread=3.0, levels=0, forbidden=0.0)]
    with ExitStack() as stack:
        whole, few = samplers(stack, temperature=temperature, **ALL)
        for row in rows:
            assert draw_from_sums(few, row, rng) == whole.sample(row.logits)
    assert sum(row.fetched for row in rows) < 0.1 * len(rows)
