"""Times that an idle model stays loaded, in Ollama's words: `5m`, `1h30m`, 300 seconds, 0, -1."""

import math
import re
from typing import Any

DEFAULT_S = 300.0
FOREVER = math.inf

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_NUMBER = r"(?:\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})"
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|μs|ms|s|m|h)")
_WHOLE = re.compile(rf"([+-]?)(?:({_NUMBER})|((?:{_PART.pattern})+))")


def keep_alive_s(given: Any) -> float:
    """Seconds of a number, which is of seconds itself, or of a text, which is such a number or one
    of Go's durations. A negative time is for ever. Raises ValueError, one line, for anything else.
    """
    if isinstance(given, int | float) and not isinstance(given, bool) and not math.isnan(given):
        return FOREVER if given < 0 else float(given)
    match = _WHOLE.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is None:
        raise ValueError(
            f"{str(given)[:40]!r} is not a time; give one such as 5m, 1h30m or 300 (seconds), 0 to "
            "unload at once, -1 for never"
        )
    sign, number, parts = match[1], match[2], match[3]
    if sign == "-":
        return FOREVER
    if number:
        return float(number)
    return sum(float(amount) * _UNITS[unit] for amount, unit in _PART.findall(parts))
