"""The comparison of two drafters, with the tiny pair."""

import pytest

import dflash_local
import mini_pair
from dflash_local.draft.shape import ShapeName
from dflash_local.loading import open_drafter
from dflash_local_tune.comparison import (
    BUILT_IN,
    OWN,
    TEMPERATURES,
    Row,
    beats_plain,
    compare,
    wins,
)


@pytest.mark.parametrize(
    ("loaded_for", "compared"), [("chain", ["chain"]), ("tree", ["chain", "tree"])]
)
def test_drafters_are_compared_in_all_shapes_that_the_target_checks(
    loaded_for: ShapeName, compared: list[ShapeName]
) -> None:
    target, draft = mini_pair.pair()
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


def rows_of(own: tuple[float, float], built_in: tuple[float, float]) -> list[Row]:
    """A comparison in which both figures changed by these ratios: of chains, and of trees."""
    return [
        Row(kind, shape, temperature, 8, 3.0, 3.0 * ratio, 100.0, 100.0 * ratio)
        for kind, ratios in ((OWN, own), (BUILT_IN, built_in))
        for shape, ratio in (("chain", ratios[0]), ("tree", ratios[1]))
        for temperature in TEMPERATURES
    ]


@pytest.mark.parametrize(
    ("own", "own_trees", "rest", "expected"),
    [
        (1.2, 1.2, 1.0, True),
        (1.2, 1.2, 0.97, True),
        (1.2, 1.2, 0.95, False),
        (1.01, 1.2, 1.0, False),
        (1.2, 0.97, 1.0, False),
    ],
)
def test_only_a_gain_without_a_loss_elsewhere_wins(
    own: float, own_trees: float, rest: float, expected: bool
) -> None:
    won, reason = wins(rows_of((own, own_trees), (rest, 1.0)))
    assert won == expected
    assert f"{min(own, own_trees):.2f} times" in reason


@pytest.mark.parametrize(
    ("chains", "trees", "rest", "expected"),
    [
        (0.86, 1.12, 1.0, True),
        (1.2, 1.1, 0.99, True),
        (0.9, 1.01, 1.2, False),
        (1.2, 1, 0.9, False),
    ],
)
def test_only_drafts_that_are_faster_beat_plain_decoding(
    chains: float, trees: float, rest: float, expected: bool
) -> None:
    won, told = beats_plain(rows_of((chains, trees), (rest, rest)))
    assert won == expected
    assert f"{max(chains, trees):.2f} times the tokens/s" in told
    assert ("plain decoding stays" in told) != expected
