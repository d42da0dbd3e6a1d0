"""Fixtures of all tests of the converter."""

from collections.abc import Iterator

import pytest

from hub_stand_in import Hub, running


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        yield hub
