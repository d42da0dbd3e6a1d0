"""The progress of a run, and the time that the rest will take."""

import time
from collections.abc import Callable

from dflash_local.bench.measure.settings import Say

_EVERY_S = 10.0
"""Between two lines. More often they would hide the results, less often a run seems to hang."""


class Pace:
    """Counts answers, and tells now and then how many are left."""

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say
        self._clock = clock
        self._n = self._n_done = 0
        self._work = self._done = 0.0
        self._began = self._said = clock()

    def start(self, n: int, work: float) -> None:
        """`n` answers are to come, which take so much `work` together, in any unit."""
        self._n, self._work = n, work
        self._began = self._said = self._clock()

    def count(self, work: float) -> None:
        self._n_done += 1
        self._done += work
        now = self._clock()
        if now - self._said >= _EVERY_S and self._n_done < self._n:
            self._said = now
            self.say(f"{self._n_done} of {self._n} answers, {self.left}")

    @property
    def left(self) -> str:
        """The time that is left, as in "about 2 min left"."""
        spent = self._clock() - self._began
        seconds = spent * (self._work - self._done) / self._done if self._done else 0.0
        if seconds < 100:
            return f"about {max(1, round(seconds))} s left"
        return f"about {round(seconds / 60)} min left"
