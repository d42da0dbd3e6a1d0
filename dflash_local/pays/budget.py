"""What drafting may lose, in plain rounds: the time of one plain round is 1."""

from __future__ import annotations

_INCOME = 0.008
"""Earned by each round, for probes. More makes them a cost of their own,
less finds a text that has turned too late."""
_AT_FIRST = 3.0
"""What both accounts begin with. With more, a useless drafter costs an answer of 200 tokens more
than 3 %; with less, some good drafters are never tried."""
_MOST_CREDIT = 32.0
"""Gains beyond this are forgotten. With more, drafting that has begun to lose goes on for too long:
for good in a process that has gained for hours."""
_SUSPENDED = 20
"""Rounds for which drafting is off for each that was lost, when its credit is spent. With twice as
many, a bad passage at the beginning costs a good drafter most of an answer; with half as many, a
useless one comes back too often."""
_MOST_LOSSES, _REMEMBERED = 4, 2
"""Lost spells in a row that count in a text, and those of them that count in the next one. Without
these limits, drafting that lost in some texts never begins again in one where it would gain."""


class Budget:
    """Two accounts: `amount` pays for probes; a credit covers drafting that was thought to pay."""

    def __init__(self) -> None:
        self.amount = _AT_FIRST
        self.suspended_until = 0
        """The round before which nothing is to be drafted."""
        self._saved = _AT_FIRST  # the most that income adds up to
        self._credit = _AT_FIRST
        self._spell = 0.0  # gained since drafting began
        self._n_losses = 0  # spells that lost, one after the other
        self._round = 0

    def renew(self) -> None:
        """Another text begins, and what the last one lost says little of it."""
        self.suspended_until = 0
        self._n_losses = min(self._n_losses, _REMEMBERED)

    def earn(self, now: int) -> None:
        """The income since the last call; `now` counts rounds."""
        earned = self.amount + _INCOME * (now - self._round)
        self.amount = max(min(earned, self._saved), self.amount)
        self._round = now

    def wait(self, price: float, upkeep: float) -> int | None:
        """Rounds until a probe of this price, which grows by `upkeep` a round, can be paid; None if
        never."""
        if upkeep >= _INCOME:
            return None
        rounds = int((price - self.amount) / (_INCOME - upkeep)) + 1
        self._saved = max(_AT_FIRST, price + upkeep * rounds)
        return rounds

    def settle_probe(self, gained: float) -> None:
        """After a probe that was `gained` plain rounds ahead of plain decoding."""
        self.amount = min(self.amount + gained, self._saved)

    def settle_unknown(self, gained: float) -> None:
        """After a round of drafting with a drafter that is not known yet. Nothing is owed, or its
        next look comes too late."""
        self.settle_probe(max(gained, -max(self.amount, 0.0)))

    def settle(self, gained: float, now: int, way: float) -> None:
        """After a round of drafting that was `gained` plain rounds ahead of plain decoding; `way`
        are those that going to drafting and back costs. The forecast ends drafting that loses,
        mostly; this is for what it does not see."""
        self._spell += gained
        self._credit = min(self._credit + gained, _MOST_CREDIT)
        if self._credit < 0:
            self._credit = _AT_FIRST
            self.suspended_until = now + round((_AT_FIRST + way) * _SUSPENDED * self.caution)

    @property
    def caution(self) -> int:
        """How many times what drafting must be worth: twice as much after each spell that lost,
        until one has gained."""
        return 1 << min(self._n_losses, _MOST_LOSSES)

    def begin(self) -> None:
        """Drafting begins: a spell."""
        self._spell = 0.0

    def end(self) -> None:
        """It ends."""
        self._n_losses = self._n_losses + 1 if self._spell < 0 else 0
