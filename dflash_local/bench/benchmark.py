"""One run from beginning to end: load, measure plain and drafted, compare with others, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_local import demo
from dflash_local.bench.measure.concurrent import ConcurrencyRow, measure_concurrent
from dflash_local.bench.measure.cost_curve import cost_curve
from dflash_local.bench.measure.environment import Environment, MemoryUse
from dflash_local.bench.measure.pace import Pace
from dflash_local.bench.measure.settings import RunSettings, Say, Variant
from dflash_local.bench.measure.single import by_category
from dflash_local.bench.peers.comparison import (
    OpenServer,
    beside_ours,
    measure_server,
    server_like,
)
from dflash_local.bench.prompts.case import (
    DEPTHS,
    Case,
    depth_lengths,
    depth_name,
    long_cases,
    random_cases,
    tokenized,
    with_random_answers,
)
from dflash_local.bench.prompts.prompt import CATEGORIES, BenchPrompt, built_in
from dflash_local.bench.replay.drafts import ReplayedDrafts
from dflash_local.bench.replay.engine import Answers, ReplayEngine
from dflash_local.bench.report.report import Report
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.errors import DflashError, InputError
from dflash_local.fit.options import LoadOptions
from dflash_local.fit.plan import Plan
from dflash_local.model import Model

OpenEngine = Callable[[Path, Path | None, LoadOptions], tuple[Engine, Plan]]
OpenModel = Callable[[Mapping[str, Any]], Model]

CURVE_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64)
_RANDOM_LENGTH = 128
_LONG_LIMIT = 2
"""Prompts for each depth: they are read several times over, which takes long."""


@dataclass(frozen=True)
class BenchOptions:
    """What one run is to measure.

    `prompts`: None for the built-in ones of `categories`. `random`: random token ids in their
    place. `replay` names where the answers of `prompts` come from, if they are to come out.
    `depths`: None for those of `case.DEPTHS`, on a CPU only the first of them. `loading` are
    keyword arguments of `load`.
    """

    target: Path
    draft: Path | None
    settings: RunSettings
    command: str
    prompts: Sequence[BenchPrompt] | None = None
    random: bool = False
    replay: str | None = None
    categories: tuple[str, ...] = CATEGORIES
    limit: int = 4
    depths: tuple[int, ...] | None = None
    thinking: bool = False
    concurrency: tuple[int, ...] = ()
    synthetic_length: float | None = None
    llama_server: Path | None = None
    server_drafts: tuple[int, ...] = (15,)
    loading: Mapping[str, Any] = field(default_factory=dict)


def benchmark(options: BenchOptions, open_engine: OpenEngine, say: Say) -> Report:
    """Measure. `open_engine` is `loading.open_engine`; `say` is called with lines on the progress.
    A KeyboardInterrupt ends it with what was measured until then, if there is anything; so does
    what fails after one request at a time was measured.

    Raises InputError where files, prompts and settings do not fit, and what `load` raises.
    """
    options = replace(options, settings=_settings(options))
    options = replace(options, loading=_loading(options))
    drafts = None
    if options.synthetic_length is not None:
        drafts = ReplayedDrafts(options.synthetic_length, options.settings.seed)
    answers: dict[tuple[int, ...], list[int]] = {}
    open_model = partial(_open, options, open_engine, answers, drafts)
    with open_model(options.loading) as model:
        settings, told = _possible(model, options.settings)
        cases, notes = _cases(model, options)
        answers |= {tuple(case.tokens): case.answer for case in cases if case.answer}
        if options.replay is not None:
            longest = max(map(len, answers.values()))
            settings = replace(settings, max_tokens=min(settings.max_tokens, longest))
        options = replace(options, settings=settings)
        report = Report(
            command=options.command,
            environment=Environment.of(model),
            settings=settings,
            rows=[],
            synthetic_length=options.synthetic_length,
            replay=options.replay,
            notes=told + notes,
            long_categories=tuple(depth_name(depth) for depth in options.depths or DEPTHS),
        )
        try:
            for rows in by_category(model, cases, settings, Pace(say)):
                report.rows += rows
        except KeyboardInterrupt:
            if not report.rows:
                raise
            return _interrupted(report, say)
        report.memory = MemoryUse.of(model)
        model.forget()
        most = min(max(model.engine.widest(model.draft_shape), 16), model.n_ctx - 1)
        report.curve = cost_curve(model.target, [n for n in CURVE_ROWS if n <= most])
        server = None
        if options.llama_server is not None:
            length = options.synthetic_length
            server = server_like(
                model, options.llama_server, options.draft, synthetic_length=length
            )
    try:
        _measure_others(report, options, cases, open_model, server, say)
    except KeyboardInterrupt:
        _interrupted(report, say)
    except DflashError as failure:
        report.failure = failure
        report.notes.append(f"not all was measured: {failure}")
    return report


def _interrupted(report: Report, say: Say) -> Report:
    report.interrupted = True
    say("interrupted: what follows was measured until then")
    return report


def _measure_others(
    report: Report,
    options: BenchOptions,
    cases: Sequence[Case],
    open_model: OpenModel,
    server: OpenServer | None,
    say: Say,
) -> None:
    """Several requests at once, and llama-server."""
    short = [case for case in cases if case.category not in report.long_categories]
    if options.concurrency and not short:
        report.notes.append("several at once: left out, as there are only long prompts")
    elif options.concurrency:
        rows, left_out = _concurrent(options, short, open_model, say)
        report.concurrency = rows
        report.notes += left_out
    if server is not None:
        n_drafts = (0, *(options.server_drafts if options.draft else ()))
        levels = sorted({row.concurrency for row in report.concurrency})
        found = measure_server(server, n_drafts, short or cases, levels, options.settings, say)
        report.server = beside_ours(found, report.rows, report.concurrency)


def _concurrent(
    options: BenchOptions, cases: Sequence[Case], open_model: OpenModel, say: Say
) -> tuple[list[ConcurrencyRow], list[str]]:
    """On a model of its own: one that is loaded for several sequences need not be the fastest for
    a single one."""
    with open_model({**options.loading, "n_seq": max(options.concurrency)}) as model:
        settings, told = _possible(model, options.settings)
        rows, notes = measure_concurrent(model.engine, cases, options.concurrency, settings, say)
        return rows, [f"several at once: {note}" for note in told] + notes


def _settings(options: BenchOptions) -> RunSettings:
    """Without a drafter there is only plain decoding; in a replay copies, too, whose gain it shows.
    With synthetic acceptance, answers cannot be compared, and those of a replay need not be: they
    are long, and measured from empty caches."""
    settings = options.settings
    if options.draft is None:
        settings = replace(settings, variants=(Variant(),) if options.replay else ())
    elif options.replay is not None:
        chosen = [variant for variant in settings.variants if variant.width == "auto"]
        without = tuple(replace(variant, copies=False) for variant in chosen)
        settings = replace(settings, variants=settings.variants + without)
    if options.synthetic_length is not None or options.replay is not None:
        settings = replace(settings, compare=False)
    if options.replay is not None:
        settings = replace(settings, caches=("cold",))
    return settings


def _loading(options: BenchOptions) -> Mapping[str, Any]:
    """Ready for trees where any drafts are to be trees; chains are measured on the same model. With
    a width the drafter stays loaded, whether drafting can pay or not; the largest is refused before
    anything is loaded if no pass can be so wide."""
    variants = options.settings.variants
    shape = "auto" if any(variant.shape != "chain" for variant in variants) else "chain"
    width = max((each.width for each in variants if each.width != "auto"), default=2)
    return {**options.loading, "draft_shape": shape, "draft_width": width}


def _possible(model: Model, settings: RunSettings) -> tuple[RunSettings, list[str]]:
    """The settings without the variants that this pair cannot draft, and notes on them. Raises
    InputError where none is left, and for a width that no shape has."""
    engine, variants = model.engine, settings.variants
    if engine.copies is None:  # then all are without copies, and without a drafter there is none
        variants = tuple(each for each in variants if each.copies and engine.drafter)
    shapes = dict.fromkeys(variant.shape for variant in variants)
    widest: DraftShape = max(shapes, key=engine.widest, default="chain")
    most = engine.widest(widest)
    for width in (variant.width for variant in variants if variant.width != "auto"):
        if width > most:
            raise InputError(
                f"a width of {width}: {engine.limit(widest)} allows at most {most}; name smaller "
                "ones"
            )
    notes = []
    if engine.chains_because and list(shapes) != ["chain"]:
        variants = tuple(dict.fromkeys(replace(variant, shape="chain") for variant in variants))
        notes.append(engine.chains_because)
    variants = tuple(v for v in variants if v.width == "auto" or v.width <= engine.widest(v.shape))
    return replace(settings, variants=variants), notes


def _cases(model: Model, options: BenchOptions) -> tuple[list[Case], list[str]]:
    room, limit, target = options.settings.max_tokens, options.limit, model.target
    prompts, depths = options.prompts, options.depths
    is_random = options.random and options.replay is None
    if prompts is None and not is_random:
        shipped = options.target.resolve() == demo.pair()[0].resolve()
        prompts = built_in(options.categories, limit=limit, shipped=shipped)
        if depths is None and "long" in options.categories:
            depths = DEPTHS if target.options.n_gpu_layers else DEPTHS[:1]
    lengths, left_out = depth_lengths(depths or (), n_ctx=model.n_ctx, room=room)
    if is_random:
        lengths = {"random": _RANDOM_LENGTH} | lengths
        cases, notes = random_cases(target.n_vocab, lengths, limit=limit), left_out
    else:
        cases, notes = tokenized(model, prompts or (), room=room, thinking=options.thinking)
        cases += long_cases(model, lengths, limit=min(limit, _LONG_LIMIT))
        notes += left_out
    if not cases:
        raise InputError(
            f"no prompt is left to measure: {'; '.join(notes) or 'none was asked for'}"
        )
    if options.synthetic_length is not None and options.replay is None:
        cases = with_random_answers(target, cases, min(room, model.n_ctx))
    return cases, notes


def _open(
    options: BenchOptions,
    open_engine: OpenEngine,
    answers: Answers,
    drafts: ReplayedDrafts | None,
    loading: Mapping[str, Any],
) -> Model:
    """A model; where `answers` are to come out, one that replays them."""
    engine, plan = open_engine(options.target, options.draft, LoadOptions(**loading))
    if options.replay is not None or drafts is not None:
        if options.replay is None:
            engine.copies = None  # a random answer repeats nothing
        engine = ReplayEngine(engine, answers, drafts)
    return Model(engine, plan)
