"""The variants that are measured, and their order."""

from dflash_local.bench.measure.settings import PLAIN, RunSettings, Variant, variants_from


def test_variants_are_the_chosen_width_and_the_fixed_ones_in_each_shape() -> None:
    assert list(map(str, variants_from(("chain", "tree", "auto"), (4, 8)))) == [
        "chain auto",
        "tree auto",
        "auto",
        "chain 4",
        "tree 4",
        "chain 8",
        "tree 8",
    ]


def test_every_other_turn_goes_backwards() -> None:
    settings = RunSettings(variants=(Variant(), Variant(4)))
    assert settings.turns() == (PLAIN, Variant(), Variant(4))
    assert settings.turns(1) == (Variant(4), Variant(), PLAIN)
