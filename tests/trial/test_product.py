"""This build of llama.cpp multiplies quantised matrices as it should."""

from dflash_local.trial.product import wrong_product


def test_quantised_products_are_right_here() -> None:
    assert wrong_product() is None
