"""Fixtures that the tests of chats share."""

import pytest

from dflash_local import Model
from forced_grammar import Forced


@pytest.fixture(scope="module")
def forced(model: Model) -> Forced:
    return Forced(model)
