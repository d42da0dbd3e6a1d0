"""The comparison of two drafters, with the shipped pair."""

from __future__ import annotations

import pytest

import dflash_local
from dflash_local import demo
from dflash_local.draft.shape import ShapeName
from dflash_local.loading import open_drafter
from dflash_local.tune.comparison import OWN, TEMPERATURES, compare


@pytest.mark.parametrize(
    ("loaded_for", "compared"), [("chain", ["chain"]), ("tree", ["chain", "tree"])]
)
def test_drafters_are_compared_in_all_shapes_that_the_target_checks(
    loaded_for: ShapeName, compared: list[ShapeName]
) -> None:
    target, draft = demo.pair()
    with dflash_local.load(
        target, draft, n_ctx=512, n_gpu_layers=0, draft_shape=loaded_for, draft_width=8
    ) as model:
        engine = model.engine
        assert engine.drafter is not None
        same = open_drafter(
            draft, engine.target, n_seq=1, n_ctx=512, for_trees=loaded_for == "tree"
        )
        prompts = {OWN: [model.tokenize("def fib(n):\n")], "none": []}
        lines: list[str] = []
        rows = compare(engine.target, engine.drafter, same, prompts, 12, lines.append)
        same.close()
    expected = [(OWN, shape, temperature) for shape in compared for temperature in TEMPERATURES]
    assert [(row.prompts, row.shape, row.temperature) for row in rows] == expected
    assert len(lines) == len(rows)
    # Trees of the same drafter keep at least what its chains keep.
    greedy = [row.length_before for row in rows if row.temperature == 0]
    assert greedy == sorted(greedy)
    assert all(row.ratio == 1 for row in rows)
