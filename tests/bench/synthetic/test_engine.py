"""A real engine with synthetic acceptance: it accepts as much as rounds without an engine do."""

from __future__ import annotations

from itertools import accumulate

import pytest

from dflash_local.bench.synthetic.acceptance import SyntheticAcceptance
from dflash_local.bench.synthetic.engine import synthetic_engine
from dflash_local.bench.synthetic.recorded import RecordedDrafts
from dflash_local.draft.shape import DraftShape
from pair_engine import open_engine, request
from synthetic_rounds import lengths, synthetic


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("shape", "width"), [("chain", 16), ("tree", 16), ("tree", 32)])
def test_a_real_engine_accepts_what_it_is_told(shape: DraftShape, width: int) -> None:
    with open_engine(n_branches=33 if shape == "tree" else 1) as engine:
        vocabulary = engine.target.vocabulary
        acceptance = SyntheticAcceptance(
            RecordedDrafts.shipped(), 5.0, 3, usable=lambda token: not vocabulary.ends_text(token)
        )
        engine = synthetic_engine(engine, acceptance)
        sequence = engine.begin(request(vocabulary.tokenize("def f(x):"), width, 97, shape=shape))
        found: list[int] = []
        while sequence.finish_reason is None:
            before = len(sequence.tokens)
            engine.step([sequence])
            found.append(len(sequence.tokens) - before)
        engine.end(sequence)
    found = [n for n in found if n]
    assert found.pop(0) == 1 and 1 + sum(found) == 97
    expected = lengths(synthetic(5.0, seed=3), len(found), width=width, tree=shape == "tree")
    # Where the end of the answer is near, drafts are cut there.
    n = sum(1 for total in accumulate(found) if total < 80)
    assert found[:n] == expected[:n]
