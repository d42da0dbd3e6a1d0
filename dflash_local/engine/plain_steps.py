"""Plain decoding: rounds in which nothing is drafted."""

from dflash_local.controller.costs import TO_MAKE
from dflash_local.engine.meter import Lap, Meter
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slots

_AHEAD_S, _MOST_AHEAD = 0.016, 16
"""The most plain steps in one call, in seconds, a screen's frame, and in number. More would delay
tokens on their way out, and a cancel. With one at a time, Python costs a small model a tenth of its
speed."""


class PlainSteps:
    """Decodes a plain step, or several at once."""

    def __init__(self, slots: Slots, meter: Meter) -> None:
        self._slots = slots
        self._target = slots.target
        self._meter = meter
        self._controller = meter.controller

    def run(self, sequences: list[Sequence], lap: Lap) -> None:
        """A plain step, or several at once where nothing is asked between them."""
        lap.verifying()
        n_steps = self._n_steps(sequences)
        slots, anchors = [s.slot for s in sequences], [s.anchor for s in sequences]
        # None: the likeliest token comes, and the sequence draws its own below.
        draws = [s.sampler.native if s.draws_natively else None for s in sequences]
        given = self._given(sequences, n_steps)
        steps = self._slots.decode_ahead(slots, anchors, n_steps, draws, given)
        lap.accepting(len(sequences), n_steps=len(steps))
        for i, sequence in enumerate(sequences):
            with sequence.isolated_errors(self._slots):
                if not sequence.draws_natively:  # then it is the only step
                    with lap.sampling(sequence):
                        steps[0][i] = sequence.draw(self._target, i)
                self._emit_steps(sequence, [step[i] for step in steps], i, len(sequences))

    @staticmethod
    def _given(sequences: list[Sequence], n_steps: int) -> list[int]:
        """The tokens of these steps, one of each sequence for each step, where they are known
        before: only when `bench` replays answers."""
        texts = [sequence.upcoming(n_steps) for sequence in sequences]
        return [token for step in zip(*texts, strict=True) for token in step]

    def _n_steps(self, sequences: list[Sequence]) -> int:
        """The number of plain steps to decode at once, without a delay that readers notice."""
        n = len(sequences)
        if not all(s.draws_natively for s in sequences):
            return 1
        left = [s.remaining for s in sequences if s.remaining is not None]
        by_time = int(_AHEAD_S / self._meter.step_s) + 1
        most = _MOST_AHEAD if n == self._meter.last_rows else TO_MAKE
        left += [self._slots.n_left(s.slot) for s in sequences]
        n_steps = min([*left, self._slots.free_cells // n, by_time, most])
        if self._controller and any(
            s.policy and not s.without_drafter(self._slots) for s in sequences
        ):
            # A copy that begins within these steps is missed. Most begin early in an answer, or
            # soon after another one. So no more steps than there were plain ones (passes of as many
            # rows) since the last copy, or since the answer began.
            new = min([self._meter.n_in_a_row, *(len(s.tokens) for s in sequences)])
            n_steps = min(n_steps, self._controller.idle + 1, max(new, TO_MAKE))
        return max(n_steps, 1)

    def _emit_steps(self, sequence: Sequence, tokens: list[int], i: int, n: int) -> None:
        """Emit the tokens that the i-th of n sequences has decoded plainly, up to its end."""
        slot, ends_text = sequence.slot, self._target.vocabulary.ends_text
        fed, n_kept = [sequence.anchor, *tokens[:-1]], 0
        for drawn in tokens:
            token = sequence.sampler.checked(drawn)
            n_kept += 1
            sequence.stats.record_round(drafted=0, emitted=1)
            if sequence.emit(token, ends_text=ends_text(token)):
                break
        rows = range(i, i + n * len(tokens), n)  # a step has a row of each sequence
        features = sequence.wants_features
        self._slots.commit(slot, fed[:n_kept], rows[:n_kept], features=features)
        if n_kept < len(tokens) and not self._target.truncate(slot.seq, len(slot.cached)):
            # A recurrent state cannot forget the steps after the end of the answer. So the slot
            # counts them as well: they are in the cache, though nobody has seen their tokens.
            self._slots.commit(slot, fed[n_kept:], rows[n_kept:], features=features)
