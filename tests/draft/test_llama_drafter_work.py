"""The drafter over llama.cpp's own context in the engine, and the host's part of its drafts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local import demo
from dflash_local.draft.llama_drafter import best_path, top_ids
from dflash_local.engine.engine import Engine
from dflash_local.errors import BackendError
from dflash_local.loading import open_drafter
from pair_engine import answer, open_target, plain_tokens

# At work in the engine


def test_the_shipped_pair_answers_as_without_and_accepts_as_fused() -> None:
    prompts = demo.prompts()
    prompts = prompts["chat"][:3] + prompts["code"][:3]
    accepted: dict[str, float] = {}
    with open_target() as target:
        tokens = [target.vocabulary.tokenize(prompt) for prompt in prompts]
        plain = [plain_tokens(target, prompt, 96) for prompt in tokens]
        for runner in ("fused", "llama.cpp"):
            drafter = open_drafter(
                demo.pair()[1], target, n_seq=1, n_ctx=target.n_ctx, runs_on=runner
            )
            engine = Engine(target, drafter)
            answers = [answer(engine, prompt, 16, 96) for prompt in tokens]
            assert [a.tokens for a in answers] == plain
            stats = [a.stats for a in answers]
            accepted[runner] = sum(s.emitted for s in stats) / sum(s.rounds for s in stats)
            engine.forget_all()
            drafter.close()
    assert accepted["fused"] > 2.8
    assert accepted["llama.cpp"] == pytest.approx(accepted["fused"], rel=0.02)


# The host's part


@given(data=st.data())
@settings(deadline=None)
def test_the_best_of_a_row(data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([1, 7, 127, 128, 129, 300, 1000]))
    k = data.draw(st.integers(1, 12))
    values = data.draw(st.sampled_from([5, 100, 100000]))  # few values: many ties
    seed = data.draw(st.integers(0, 1000))
    rows = np.random.default_rng(seed).integers(values, size=(3, width)).astype(np.float32)
    rows[:, ::3] = data.draw(st.sampled_from([0.0, -np.inf]))
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    assert np.array_equal(
        np.take_along_axis(rows, top_ids(rows, k), 1), np.take_along_axis(rows, expected, 1)
    )


def test_a_path_follows_the_scores_after_the_token_taken() -> None:
    after_anchor = [11, 12, 0.0, 1.0, 0.0, 1.0]
    after_11_or_12 = [21, 22, 5.0, 0.0, 0.0, math.log(3.0)]
    draft = best_path(np.array([after_anchor, after_11_or_12], np.float32), 2)
    assert draft.tokens == [12, 22] and draft.parents == [-1, 0]
    assert draft.logprobs == pytest.approx([-math.log(1 + math.exp(-1)), math.log(0.75)])
    with pytest.raises(BackendError, match="not a number"):
        best_path(np.full((1, 6), np.nan, np.float32), 2)
