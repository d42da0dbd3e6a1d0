"""The same prompts and limits through llama-server, plain and with its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.bench.measure.concurrent import TURNS, ConcurrencyRow
from dflash_local.bench.measure.settings import PLAIN, RunSettings, Say, Variant
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.measure.speed import LEAST_TOKENS, Spread
from dflash_local.bench.prompts.case import Case
from dflash_local.fit.overrides import experts_of
from dflash_local.gguf.drafter_spec import AssistantSpec, DrafterSpec, HeadsSpec
from dflash_local.pair import Pair
from lab.bench.llama_server import LlamaServer, ServerAnswer
from lab.replay.recorded import RecordedDrafts

if TYPE_CHECKING:
    from dflash_local.model import Model

OpenServer = Callable[[int, int], LlamaServer]
"""A server for so many drafts a round (0: plain decoding) and so many slots, not yet started."""

_WARM_UP_TOKENS = 16


def whole_chain(pair: Pair) -> int | None:
    """The drafts of a whole chain, of which a synthetic length is the mean: those of heads; None:
    as many as were recorded."""
    return pair.spec.n_draft if isinstance(pair.spec, (HeadsSpec, AssistantSpec)) else None


def server_like(
    model: Model, binary: Path, pair: Pair, *, synthetic_length: float | None
) -> OpenServer:
    """A function that starts llama-server with the files and settings of `model`; the model itself
    may be closed before.

    With `synthetic_length`, rounds of whole chains emit so many tokens; None leaves it to the
    models.
    """
    target, options, n_ctx = model.target.path, model.target.options, model.n_ctx
    draft, drafts_by = pair.draft.path if pair.draft else None, "draft-dflash"
    if isinstance(pair.spec, HeadsSpec):
        draft, drafts_by = None, "draft-mtp"
    elif isinstance(pair.spec, AssistantSpec):
        drafts_by = "draft-mtp"
    elif isinstance(pair.spec, DrafterSpec) and pair.spec.family == "dspark":
        drafts_by = "draft-dspark"
    n_threads = model.target.n_threads
    overrides = dict(options.override_tensor)
    if options.n_cpu_moe:
        overrides[experts_of(options.n_cpu_moe)] = "CPU"

    def server(n_drafts: int, n_slots: int) -> LlamaServer:
        rates = None
        if n_drafts and synthetic_length is not None:
            rates = RecordedDrafts.shipped().rates(synthetic_length, n_drafts, whole_chain(pair))
        return LlamaServer(
            binary,
            target,
            draft if n_drafts else None,
            n_ctx=n_ctx // n_slots,  # its slots share the context, as our sequences do
            n_slots=n_slots,
            n_gpu_layers=options.n_gpu_layers,
            n_threads=n_threads,
            n_draft_max=n_drafts or 1,
            drafts_by=drafts_by if n_drafts else "",
            synthetic_rates=rates,
            flash_attn=options.flash_attn,
            kv_type=options.kv_type,
            overrides=overrides,
        )

    return server


@dataclass(frozen=True)
class ServerRow:
    """A category through the server: tokens/s of one request, or of all that ran at once.

    `n_drafts` are its drafts a round, 0 for plain decoding. `ours` are this package's tokens/s on
    the same prompts: plain, or with drafts of the width that it chose itself.
    """

    category: str
    temperature: float
    concurrency: int
    n_drafts: int
    tokens_per_second: Spread
    ttft_s: Spread | None
    accepted_length: float | None
    ours: dict[Variant, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        theirs = self.tokens_per_second.median
        ours = [
            {"variant": variant, "tokens_per_second": speed, "over_theirs": speed / theirs}
            for variant, speed in self.ours.items()
        ]
        return {**vars(self), "ours": ours}


def measure_server(
    server_for: OpenServer,
    n_drafts: Sequence[int],
    cases: Sequence[Case],
    levels: Sequence[int],
    settings: RunSettings,
    say: Say,
) -> list[ServerRow]:
    """Measure the server on its own: one process for each of `n_drafts` and each number of slots.

    `levels` are the numbers of requests at once, beside 1. Raises as `LlamaServer`.
    """
    rows: list[ServerRow] = []
    for n in (1, *(level for level in levels if level > 1)):
        for drafts in n_drafts:
            with server_for(drafts, n) as server:
                server.complete(cases[0].tokens, **_options(settings, 0.0, 0, _WARM_UP_TOKENS))
                for temperature in settings.temperatures:
                    for category in dict.fromkeys(case.category for case in cases):
                        own = [case for case in cases if case.category == category]
                        measure = _alone if n == 1 else _at_once
                        speeds, answers = measure(server, own, n, temperature, settings)
                        if speeds is None:
                            continue
                        row = ServerRow(
                            category=category,
                            temperature=temperature,
                            concurrency=n,
                            n_drafts=drafts,
                            tokens_per_second=speeds,
                            ttft_s=Spread.of(answer.ttft_s for answer in answers),
                            accepted_length=_accepted_length(answers) if drafts else None,
                        )
                        say(_progress(row))
                        rows.append(row)
    return rows


def beside_ours(
    rows: Sequence[ServerRow], single: Sequence[SpeedRow], concurrent: Sequence[ConcurrencyRow]
) -> list[ServerRow]:
    """The rows with this package's speeds on the same prompts: plain beside plain, and drafted
    beside drafted, of the variants with the first width that was measured."""
    ours: dict[tuple[str, float, int], dict[Variant, float]] = {}
    for row in single:
        for variant, speed in ((PLAIN, row.plain), (row.variant, row.drafted)):
            if row.cache == "cold" and speed and speed.median:
                key = row.category, row.temperature, 1
                ours.setdefault(key, {})[variant] = speed.median
    for many in concurrent:
        for variant, found in ((PLAIN, many.plain), (many.variant, many.drafted)):
            if many.concurrency > 1 and found:
                key = many.category, many.temperature, many.concurrency
                ours.setdefault(key, {})[variant] = found.total_tokens_per_second.median
    return [
        replace(each, ours=_comparable(each, ours.get(key, {})))
        for each in rows
        for key in [(each.category, each.temperature, each.concurrency)]
    ]


def _comparable(row: ServerRow, ours: dict[Variant, float]) -> dict[Variant, float]:
    drafted = [variant for variant in ours if variant != PLAIN]
    chosen = [PLAIN]
    if row.n_drafts:
        chosen = [variant for variant in drafted if variant.width == drafted[0].width]
    return {variant: ours[variant] for variant in chosen if variant in ours}


def _options(
    settings: RunSettings, temperature: float, repeat: int, max_tokens: int | None = None
) -> dict[str, Any]:
    return {
        "max_tokens": max_tokens or settings.max_tokens,
        "temperature": temperature,
        "seed": settings.seed + repeat,
        "ignore_eos": not settings.compare,
    }


def _alone(
    server: LlamaServer, cases: Sequence[Case], _n: int, temperature: float, settings: RunSettings
) -> tuple[Spread | None, list[ServerAnswer]]:
    answers = [
        server.complete(case.tokens, **_options(settings, temperature, repeat))
        for repeat in range(settings.repeat)
        for case in cases
    ]
    speeds = (answer.tokens_per_second for answer in answers if answer.n_tokens > LEAST_TOKENS)
    return Spread.of(speeds), answers


def _at_once(
    server: LlamaServer, cases: Sequence[Case], n: int, temperature: float, settings: RunSettings
) -> tuple[Spread | None, list[ServerAnswer]]:
    prompts = [cases[i % len(cases)].tokens for i in range(TURNS * n)]
    totals: list[float] = []
    answers: list[ServerAnswer] = []
    for repeat in range(max(2, settings.repeat)):
        found, seconds = server.complete_all(prompts, **_options(settings, temperature, repeat))
        totals.append(sum(answer.n_tokens for answer in found) / seconds)
        answers += found
    return Spread.of(totals), answers


def _accepted_length(answers: Sequence[ServerAnswer]) -> float | None:
    tokens = sum(answer.n_tokens - 1 for answer in answers)
    rounds = sum(answer.rounds for answer in answers)
    return tokens / rounds if rounds > 0 else None


def _progress(row: ServerRow) -> str:
    kind = f"{row.n_drafts} drafts" if row.n_drafts else "plain"
    at_once = f", {row.concurrency} at once" if row.concurrency > 1 else ""
    return (
        f"llama-server, {kind}: {row.category}, temperature {row.temperature:g}{at_once}: "
        f"{row.tokens_per_second.median:.4g} tokens/s"
    )
