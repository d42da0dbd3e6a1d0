"""The time that an idle model stays loaded: texts that are read as one, and that are none."""

import math
from typing import Any

import pytest

from dflash_local.server.models.keep_alive import keep_alive_s


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((0, 0), (300, 300), (2.5, 2.5), (-1, math.inf), ("0", 0), ("-1", math.inf), ("90", 90)),
        *(("5m", 300), (" 5m ", 300), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25)),
        *(("-1s", math.inf), ("24h", 86400)),
    ],
)
def test_times(given: Any, seconds: float) -> None:
    assert keep_alive_s(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "soon", "5x", "m", "5 m", "1h 30m", "nan", math.nan, True, None, [], "9" * 99]
)
def test_what_is_no_time(given: Any) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        keep_alive_s(given)
