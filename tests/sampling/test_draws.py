"""A draw from a pass of a target is that from the whole row of logits, whatever the settings."""

import ctypes
import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import llama_cpp.llama_cpp as api
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_local.errors import InputError
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler
from given_rows import GivenRows

Logits = NDArray[np.float32]

N_VOCAB = 16384
"""So many that a device finds 201 candidates in them."""
N_ROWS = 8


@pytest.fixture(scope="module")
def given_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GivenRows]:
    with closing(GivenRows(tmp_path_factory.mktemp("given"), N_VOCAB)) as rows:
        yield rows


def log_sum_of(row: Logits) -> float:
    logits = row.astype(np.float64)
    return float(logits.max() + np.log(np.exp(logits - logits.max()).sum()))


def samplers(stack: ExitStack, **options: Any) -> tuple[Sampler, Sampler]:
    """Two alike."""
    params = SamplingParams(**{"seed": 7, **options})
    first, second = (stack.enter_context(Sampler(params, N_VOCAB, n_ctx=64)) for _ in range(2))
    return first, second


LIMITS = {
    "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
    "top_k": st.sampled_from([0, 1, 2, 5, 40, 200, N_VOCAB - 1, N_VOCAB, N_VOCAB + 9]),
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


def rows_of(
    seed: int, spread: float, levels: int, forbidden: float, n_vocab: int = N_VOCAB
) -> Logits:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (N_ROWS, n_vocab))
    if levels:
        logits = np.round(logits * levels) / levels
    logits[rng.random(logits.shape) < forbidden] = -np.inf
    logits[:, 3] = np.maximum(logits[:, 3], 0)
    return logits.astype(np.float32)


@settings(max_examples=100)
@given(
    options=OPTIONS,
    rows=ROWS,
    prompt=st.lists(st.integers(0, N_VOCAB - 1), max_size=20),
    on_device=st.booleans(),
)
def test_a_pass_draws_what_the_whole_row_draws(
    given_rows: GivenRows,
    options: dict[str, Any],
    rows: dict[str, Any],
    prompt: list[int],
    on_device: bool,
) -> None:
    logits, target = rows_of(**rows), given_rows.target
    given_rows.decode(logits)
    target.native.search_on_cpu = on_device
    with ExitStack() as stack:
        whole, few = samplers(stack, **options)
        for sampler in (whole, few):
            sampler.accept_prompt(prompt)
        for i, row in enumerate(logits):
            assert np.array_equal(target.logits(i), row)
            try:
                drawn = whole.sample(row)
            except InputError:
                with pytest.raises(InputError, match="no token"):
                    few.draw(target, i)
                return
            assert few.draw(target, i) == drawn
            if few.params.logprobs is not None and few.n_candidates is not None:
                candidates = target.candidates(i, few.n_candidates)
                told = few.logprobs_from(*candidates, log_sum_of(row), drawn, lambda r=row: r)
                expected = whole.logprobs(row, drawn)
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
def test_usual_rows_are_not_fetched(given_rows: GivenRows, options: dict[str, Any]) -> None:
    def fetched() -> Logits:
        raise AssertionError("a whole row for log-probabilities")

    target = given_rows.target
    target.native.search_on_cpu = True
    logits = rows_of(seed=3, spread=8.0, levels=0, forbidden=0.0)
    given_rows.decode(logits)
    before = target.native.n_whole_rows
    with ExitStack() as stack:
        whole, few = samplers(stack, **{"temperature": 0.8, **options})
        assert few.n_candidates is not None
        for i, row in enumerate(logits):
            drawn = few.draw(target, i)
            if "logprobs" in options:
                candidates = target.candidates(i, few.n_candidates)
                few.logprobs_from(*candidates, target.log_sum(i), drawn, fetched)
            assert whole.sample(row) == drawn
    assert target.native.n_whole_rows == before


@pytest.mark.parametrize("on_device", [False, True])
def test_logits_of_sixteen_bits_are_seldom_fetched(given_rows: GivenRows, on_device: bool) -> None:
    """They are often equal, but of a token that is drawn seldom."""
    target = given_rows.target
    target.native.search_on_cpu = on_device
    before, n_tied, n = target.native.n_whole_rows, 0, 0
    with ExitStack() as stack:
        whole, few = samplers(stack, temperature=0.8, top_k=40)
        for seed in range(40):
            logits = rows_of(seed=seed, spread=8.0, levels=8, forbidden=0.0)
            given_rows.decode(logits)
            for i, row in enumerate(logits):
                n += 1
                n_tied += len(set(target.candidates(i, 41)[1].tolist())) < 41
                assert few.draw(target, i) == whole.sample(row)
    assert n_tied > 0.9 * n
    assert target.native.n_whole_rows - before < 0.1 * n


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


def llama_cpp_draws(rows: Logits, temperature: float, seed: int) -> list[int]:
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for sampler in (api.llama_sampler_init_temp(temperature), api.llama_sampler_init_dist(seed)):
        api.llama_sampler_chain_add(chain, sampler)
    drawn = []
    for row in rows:
        tokens = (api.llama_token_data * len(row))()
        table = np.frombuffer(tokens, np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")]))
        table["id"], table["logit"] = np.arange(len(row)), row
        array = api.llama_token_data_array(tokens, len(row), -1, False)
        api.llama_sampler_apply(chain, ctypes.byref(array))
        drawn.append(int(array.data[array.selected].id))
    api.llama_sampler_free(chain)
    return drawn


@given(
    temperature=TEMPERATURES,
    rows=ROWS,
    seed=st.integers(0, 2**32 - 2),
    n_vocab=st.sampled_from([5, 600, N_VOCAB, 151_936]),
)
def test_draws_from_all_tokens_are_those_of_llama_cpp(
    temperature: float, rows: dict[str, Any], seed: int, n_vocab: int
) -> None:
    few = rows_of(**rows, n_vocab=n_vocab)
    params = SamplingParams(temperature=temperature, seed=seed, **ALL)
    biased = SamplingParams(temperature=temperature, seed=seed, logit_bias={1: 0.0}, **ALL)
    expected = llama_cpp_draws(few, temperature, seed)
    for given_params in (params, biased):
        with Sampler(given_params, n_vocab, n_ctx=64) as sampler:
            assert [sampler.sample(row) for row in few] == expected


@pytest.mark.parametrize("spread", [0.3, 5.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sums_of_chunks_are_enough_for_most_draws(
    given_rows: GivenRows, temperature: float, spread: float
) -> None:
    """With a spread of 0.3 all tokens have like chances, so each is near its neighbours."""
    target = given_rows.target
    target.native.search_on_cpu = True
    before = target.native.n_whole_rows
    with ExitStack() as stack:
        whole, few = samplers(stack, temperature=temperature, **ALL)
        for seed in range(50):
            logits = rows_of(seed=seed, spread=spread, levels=0, forbidden=0.0)
            given_rows.decode(logits)
            for i, row in enumerate(logits):
                assert few.draw(target, i) == whole.sample(row)
    assert target.native.n_whole_rows - before < 0.1 * 50 * N_ROWS
