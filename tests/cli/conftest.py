"""Fixtures that the tests of commands share."""

from collections.abc import Iterator

import pytest

from dflash_local.target_model import exactness


@pytest.fixture(autouse=True, scope="module")
def little_is_measured() -> Iterator[None]:
    """The exactness of verification decides no answer, so it need not be measured well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "_BUDGET_S", 0.05)
        yield
