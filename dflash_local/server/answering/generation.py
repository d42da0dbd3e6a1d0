"""Generating the answers of a request: several at once, their seeds, ends and costs.

Every API makes `GenerationTask`s and reads the chunks of all of them from `stream_all`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.errors import ClosedError
from dflash_local.result import Chunk, PromptProgress, Result
from dflash_local.server.answering.sampling_fields import N_SEEDS, usual_sampling
from dflash_local.server.http.access_log import record_result
from dflash_local.server.http.security import client
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.stats import Stats
from dflash_local.worker.async_chunks import AsyncChunks


@dataclass(frozen=True)
class GenerationTask:
    """One answer to generate: token ids of the prompt, keyword arguments of `Model.astream`."""

    prompt: list[int]
    options: dict[str, Any]


def tasks_for(prompt: list[int], options: dict[str, Any], n: int) -> list[GenerationTask]:
    """`n` answers to one prompt. A seed is the first one's; the others count on from it."""
    seed = options.get("seed")
    if seed is None:
        return [GenerationTask(prompt, options)] * n
    return [GenerationTask(prompt, {**options, "seed": (seed + i) % N_SEEDS}) for i in range(n)]


async def stream_all(
    loaded: LoadedModel, tasks: Sequence[GenerationTask]
) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of all tasks as they come, each with the number of its task.

    Faults of any task are raised before the first chunk. Closing the iterator, or an error of one
    task, ends them all within one round. Raises ClosedError if the model is closed meanwhile.
    """
    items: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue()

    async def pump(index: int, chunks: AsyncChunks) -> None:
        try:
            async for chunk in chunks:
                if (result := chunk.result) is not None:
                    record_result(loaded.name, result)
                    cancel = tasks[index].options.get("cancel")
                    is_wanted = cancel is not None and cancel.is_set()
                    if result.finish_reason == "cancelled" and not is_wanted:
                        raise ClosedError("the model was closed in the middle of this answer")
                items.put_nowait((index, chunk))
            items.put_nowait((index, None))
        except Exception as error:
            items.put_nowait((index, error))

    streams: list[AsyncChunks] = []
    pumps: list[asyncio.Future[None]] = []
    try:
        usual = usual_sampling(loaded.model)
        seed = usual.get("seed")
        for i, task in enumerate(tasks):
            if seed is not None:  # the answers to one request differ
                usual["seed"] = (seed + i) % N_SEEDS
            options = {
                "queue_timeout": loaded.queue_timeout_s,
                "owner": client.get(),
                **usual,
                **task.options,
                "max_tokens": loaded.limited(task.options.get("max_tokens")),
            }
            streams.append(await loaded.model.asubmit(task.prompt, **options))
            if (recorder := loaded.source.recorder) is not None:
                recorder.add(loaded.name, task.prompt, loaded.model.target.vocabulary)
        pumps = [asyncio.ensure_future(pump(i, chunks)) for i, chunks in enumerate(streams)]
        left = len(pumps)
        while left:
            index, item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for chunks in streams:
            chunks.cancel()
        for running in pumps:
            running.cancel()
        if pumps:
            await asyncio.wait(pumps)


class RunningTimings:
    """The costs of one answer while it arrives, under llama-server's names."""

    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._n = 0

    def take(self, chunk: Chunk) -> dict[str, Any]:
        """The tokens so far, this chunk's included, and the time since the first of them."""
        now = time.perf_counter()
        if self._begun_at is None:
            self._begun_at = now
        self._n += len(chunk.tokens)
        return _speed("predicted", self._n, 1e3 * (now - self._begun_at), n_free=1)


def prompt_progress(told: PromptProgress, *, timed: bool) -> dict[str, Any]:
    """The progress of a prompt, in llama-server's form, and with its timings where `timed`."""
    ms = round(1e3 * told.seconds, 3)
    counts = {"total": told.n, "cache": told.n_cached, "processed": told.n_read, "time_ms": ms}
    fields: dict[str, Any] = {"prompt_progress": counts}
    if timed:
        fields["timings"] = {
            "cache_n": told.n_cached,
            **_speed("prompt", told.n_read - told.n_cached, ms),
            **_speed("predicted", 0, 0.0),
        }
    return fields


def timings(results: Sequence[Result]) -> dict[str, Any]:
    """Counts and milliseconds under llama-server's names, summed over `results`.

    `cache_n` and `prompt_n` together are the prompt. Of `draft_n` drafted tokens that were
    verified, `draft_n_accepted` became part of the answer. `tokens_per_round` is ours: the mean
    tokens of a verify pass. These are left out if nothing was drafted. `repeated_n`, ours, is
    there where so many tokens at the end only repeat those before them.
    """
    stats = [result.stats for result in results]
    cached = sum(s.cached_tokens for s in stats)
    prompt_n = sum(s.prompt_tokens for s in stats) - cached
    predicted_n = sum(len(result.tokens) for result in results)
    decode_ms = 1e3 * sum(s.decode_s for s in stats)
    fields: dict[str, Any] = {
        "cache_n": cached,
        **_speed("prompt", prompt_n, 1e3 * sum(s.prompt_s for s in stats)),
        **_speed("predicted", predicted_n, decode_ms, n_free=len(stats)),
    }
    drafted = sum(s.drafted for s in stats)
    if drafted:
        fields["draft_n"] = drafted
        fields["draft_n_accepted"] = sum(s.accepted for s in stats)
        fields["tokens_per_round"] = round(Stats.sum(stats).tokens_per_round, 4)
    repeated = sum(result.repeated for result in results)
    if repeated:
        fields["repeated_n"] = repeated
    return fields


def _speed(what: str, n: int, ms: float, n_free: int = 0) -> dict[str, Any]:
    """`prompt_n`, `prompt_ms` and so on, or `predicted_n` and its like. `n_free` of the tokens took
    none of this time: the first of an answer comes with its prompt."""
    ms = round(ms, 3)
    n_timed = max(n - n_free, 0)
    return {
        f"{what}_n": n,
        f"{what}_ms": ms,
        f"{what}_per_token_ms": ms / n_timed if n_timed else 0.0,
        f"{what}_per_second": 1e3 * n_timed / ms if ms else 0.0,
    }
