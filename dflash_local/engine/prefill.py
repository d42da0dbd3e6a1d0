"""Prompts, decoded chunk by chunk. One batch holds chunks of several sequences, if the target can
decode unequal ones together."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait

from dflash_local.engine import scheduler
from dflash_local.engine.prefix_cache import PrefixCache
from dflash_local.engine.round import Round
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slots
from dflash_local.fit.options import MAX_OUTPUT_ROWS
from dflash_local.prefixes.reuse import LEAST_GAIN
from dflash_local.target_model.batch import Batch, Outputs
from dflash_local.target_model.images import Embeddings

_PATIENCE_S = 0.02
"""How long a step waits for images where nothing else is to do: other requests may come."""


class Prefill:
    """Decodes the next batch of prompt rows of several sequences."""

    def __init__(self, slots: Slots, cache: PrefixCache, round_: Round) -> None:
        """`cache` has the prefixes that slots share, and makes room in them. `round_` emits the
        first token of a prompt that has ended."""
        self._slots = slots
        self._cache = cache
        self._target = slots.target
        self._round = round_
        self._rows_per_s = 0.0  # of prompts, averaged over the last chunks

    def run(self, sequences: list[Sequence], step: int, round_s: float) -> None:
        """One batch of prompt rows, and the first token of each prompt that ends in it.

        `sequences` are all sequences in progress. `step` is the number of the engine's step.
        `round_s` is the time of a round: others wait that long anyway. Raises as `Target.decode`.
        """
        start = time.perf_counter()
        streaming = any(not s.in_prompt for s in sequences)
        reading = self._without_repeats([s for s in sequences if s.in_prompt])
        images = [self._look(sequence) for sequence in reading]
        ready = [s for s, image in zip(reading, images, strict=True) if image is None]
        if reading and not ready and not streaming:
            wait([image for image in images if image], _PATIENCE_S, FIRST_COMPLETED)
            self._count(reading, 0, start)
        served = self._fitting(self._chunks(ready, streaming, round_s))
        if not served:
            return
        n_decoded = self._target.n_decoded
        texts = [(sequence, n) for sequence, n in served if not sequence.at_image]
        for sequence, n in served:
            if sequence.at_image:
                self._see(sequence, n, step)
        if self._target.needs_equal_rows or any(s.reports_prompt for s, _ in texts):
            for chunk in texts:
                self._decode([chunk], step)
        elif texts:
            self._decode(texts, step)
        n_rows = self._target.n_decoded - n_decoded
        self._count([sequence for sequence, _ in served], n_rows, start)

    def _decode(self, served: list[tuple[Sequence, int]], step: int) -> None:
        batch = Batch()
        for sequence, n in served:
            begin = len(sequence.slot.cached)
            # Only a prompt's last row gives a token. A resumed sequence has that token already.
            ends = not sequence.tokens and n == sequence.n_left
            rows = sequence.text[begin : begin + n]
            outputs: Outputs = "last" if ends else "none"
            if sequence.reports_prompt:
                outputs = "all"
            batch.add(sequence.slot.seq, begin, rows, outputs=outputs)
        self._slots.decode(batch)
        output_row = 0
        for (sequence, n), part in zip(served, batch.parts, strict=True):
            end = part.first_row + n
            self._slots.commit(
                sequence.slot,
                batch.tokens[part.first_row : end],
                range(part.first_row, end),
                features=sequence.wants_features,
            )
            if not sequence.reports_prompt:  # or its passes are narrower than others'
                sequence.slot.n_read = len(sequence.slot.cached)
            else:
                with sequence.isolated_errors(self._slots):
                    sequence.report_prompt(self._target, part.begin, n, output_row)
                output_row += n - 1
            if batch.output[end - 1]:
                if not sequence.in_prompt:
                    self._round.emit_first(sequence, output_row)
                output_row += 1
            sequence.last_prefill_step = step
            if len(sequence.slot.cached) == self._checkpoint_at(sequence):
                self._cache.keep_checkpoint(sequence.slot)

    def _see(self, sequence: Sequence, n: int, step: int) -> None:
        """Decode the image that comes next in a prompt, alone."""
        begin = len(sequence.slot.cached)
        with sequence.isolated_errors(self._slots):
            embeddings = sequence.seen.pop(begin).result()
        if sequence.error is not None:
            return
        ids = sequence.request.prompt[begin : begin + n]
        features = sequence.wants_features
        self._slots.decode_image(sequence.slot, embeddings, ids, features=features)
        sequence.last_prefill_step = step
        if len(sequence.slot.cached) == self._checkpoint_at(sequence):
            self._cache.keep_checkpoint(sequence.slot)

    def _look(self, sequence: Sequence) -> Future[Embeddings] | None:
        """Begin to compute the next image of a prompt, while what is before it is decoded. Returns
        it if it is what comes next and not yet there."""
        begin, images = len(sequence.slot.cached), sequence.request.images
        place = min((place for place in images if place >= begin), default=-1)
        if place >= 0 and place not in sequence.seen:
            sequence.seen = {place: images[place].embeddings(place)}
        image = sequence.seen.get(begin)
        return None if image is None or image.done() else image

    def _chunks(
        self, reading: list[Sequence], streaming: bool, round_s: float
    ) -> list[tuple[Sequence, int]]:
        """The sequences whose prompt goes on in this step, with their numbers of rows."""
        if not reading:
            return []
        if self._slots.least > 1:  # a chunk is as wide as if it were alone, and in its own pass
            reading, streaming = [min(reading, key=lambda s: s.last_prefill_step)], False
        n_rows = scheduler.chunk_rows(self._target.n_batch, streaming, self._rows_per_s, round_s)
        left = [s.n_left for s in reading]
        last_steps = [s.last_prefill_step for s in reading]
        rows = scheduler.share_rows(left, last_steps, n_rows)
        return [(s, self._chunk(s, n)) for s, n in zip(reading, rows, strict=True) if n]

    def _chunk(self, sequence: Sequence, n_rows: int) -> int:
        """At most `n_rows` rows, up to where a checkpoint is to be kept or an image begins, and
        where their logits are wanted no more than a pass can have. An image as a whole."""
        begin = len(sequence.slot.cached)
        if sequence.at_image:
            return sequence.request.images[begin].n_positions
        if self._slots.least > 1:  # an image has put the rows out of step with where slots are cut
            n_rows = min(n_rows, self._slots.least - begin % self._slots.least)
        for place in sequence.request.images:
            if begin < place < begin + n_rows:
                n_rows = place - begin
        if sequence.reports_prompt:
            n_rows = min(n_rows, MAX_OUTPUT_ROWS)
        n = (self._checkpoint_at(sequence) or 0) - len(sequence.slot.cached)
        return n if 0 < n < n_rows else n_rows

    def _checkpoint_at(self, sequence: Sequence) -> int | None:
        return self._cache.checkpoint_at(sequence.slot, sequence.request)

    def _without_repeats(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences whose prompt goes on. If several begin with the same text, one decodes it
        and the others wait and take it over."""
        texts = [sequence.text for sequence in sequences]
        for sequence, text in zip(sequences, texts, strict=True):
            if sequence.request.cache_prompt:
                n = self._cache.catch_up(sequence.slot, text, for_drafts=sequence.wants_features)
                sequence.stats.cached_tokens += n
        alike = [i for i, s in enumerate(sequences) if s.request.cache_prompt]
        n_cached = [len(sequences[i].slot.cached) for i in alike]
        least = max(LEAST_GAIN, self._slots.least)
        going = scheduler.ahead([texts[i] for i in alike], n_cached, least)
        waiting = set(alike) - {alike[i] for i in going}
        return [s for i, s in enumerate(sequences) if i not in waiting]

    def _fitting(self, chunks: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """The sequences whose whole prompt fits. The others end: the context is full."""
        self._cache.make_room(sum(sequence.n_cells_left for sequence, _ in chunks))
        room = self._slots.free_cells
        fitting = []
        for sequence, n in chunks:
            if sequence.n_cells_left > room:  # other sequences hold the rest of the cells
                sequence.finish_reason = "length"
            else:
                fitting.append((sequence, n))
                room -= sequence.n_cells_left if sequence.at_image else n
        return fitting

    def _count(self, sequences: list[Sequence], n_rows: int, start: float) -> None:
        now = time.perf_counter()
        if n_rows >= scheduler.LEAST_ROWS:
            rate = n_rows / (now - start)
            self._rows_per_s += (rate - self._rows_per_s) / 4 if self._rows_per_s else rate
        for sequence in sequences:
            sequence.stats.prompt_s += now - start
            if len(sequence.tokens) <= 1:
                sequence.stats.ttft_s = now - sequence.begun_at + sequence.stats.queue_s
