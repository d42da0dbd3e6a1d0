"""The variants that are measured, and their order."""

from dflash_local.bench.measure.settings import PLAIN, RunSettings, Variant


def test_every_other_turn_goes_backwards() -> None:
    settings = RunSettings(variants=(Variant(), Variant(4)))
    assert settings.turns() == (PLAIN, Variant(), Variant(4))
    assert settings.turns(1) == (Variant(4), Variant(), PLAIN)
