"""What drafting may cost, and has brought: accounts in plain rounds, the time of one being 1."""

from __future__ import annotations

INCOME = 0.008
"""Of the time, what looking again whether drafting pays may cost."""
FULL, AT_FIRST = 3.0, 3.5
"""The most that is saved up, and what there is at the very start: an answer of 200 tokens loses no
more than 3 % by a drafter that is of no use."""
_IN_DEBT = -3.0
"""Plain rounds lost at which learning what a drafter is worth ends."""
DEAREST = 10.0
"""The most that a single look is worth; where graphs are made anew for it, a tiny model's step is
little beside them."""
SUSPENDED, _LONGEST = 64, 1024
"""Rounds without drafting after `_BEHIND`, twice as many each time, until it
has paid in between."""

_BLEND = 0.25
_SHARE_OF_GAIN = 0.05
_AHEAD, _AT_FIRST_LEAD, _BEHIND = 12.0, -3.0, -7.0
"""The most lead that is remembered, and the lag at which drafting is suspended. The estimates end
drafting long before; this is for what they cannot see."""


class Purse:
    """Pays for rounds that are expected to lose time, and watches those that are not."""

    def __init__(self) -> None:
        self.amount = AT_FIRST
        self._full = FULL
        self.suspended_until = 0
        self._suspended = SUSPENDED
        self._lead = _AT_FIRST_LEAD
        self._round = 0
        self._trend = 0.0

    @property
    def losing(self) -> bool:
        """Whether the last few rounds that drafted were behind plain decoding."""
        return self._trend < 0

    @property
    def in_debt(self) -> bool:
        """Whether learning what a drafter is worth has lost so much that it must end: not when the
        rounds before those that lost had gained more."""
        return self.amount < _IN_DEBT and self._lead < _AT_FIRST_LEAD

    def forgive(self) -> None:
        """Another text begins, and what the last one lost says little of it."""
        self.suspended_until = 0
        self._lead = max(self._lead, _AT_FIRST_LEAD)
        self._trend = 0.0

    def earn(self, now: int) -> None:
        """The income since the last call; `now` counts rounds."""
        earned = self.amount + INCOME * (now - self._round)
        self.amount = max(min(earned, self._full), self.amount)
        self._round = now

    def wait(self, price: float, upkeep: float) -> int | None:
        """Rounds until `price`, growing by `upkeep` a round, can be paid; None: never."""
        if upkeep >= INCOME:
            return None
        rounds = int((price - self.amount) / (INCOME - upkeep)) + 1
        price += upkeep * rounds
        if price > DEAREST:
            return None
        self._full = max(FULL, price)
        return rounds

    def settle(self, gained: float, now: int, *, exploring: bool, learning: bool) -> None:
        """After a round that drafted and was `gained` plain rounds ahead of plain decoding.

        `exploring`: it was a probe, which the purse pays for; `learning`: so little is known of the
        drafter that all its rounds count as such.
        """
        paid = exploring or learning
        self.amount += gained if paid else _SHARE_OF_GAIN * gained
        self.amount = min(self.amount, AT_FIRST if paid else self._full)
        if exploring:
            return
        self._trend += _BLEND * (gained - self._trend)
        self._lead = min(self._lead + gained, _AHEAD)
        if self._lead == _AHEAD:
            self._suspended = SUSPENDED
        if self._lead < _BEHIND:
            self._lead = 0.0
            self.suspended_until = now + self._suspended
            self._suspended = min(2 * self._suspended, _LONGEST)
