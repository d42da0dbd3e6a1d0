"""One run from beginning to end: load, measure plain and drafted, hold against others, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_local import demo
from dflash_local.bench.measure.concurrent import ConcurrencyRow, run_together
from dflash_local.bench.measure.environment import Machine, memory_of
from dflash_local.bench.measure.single import Restart, Say, Settings, begin_anyhow, run
from dflash_local.bench.measure.speed import Way, Width, cost_curve
from dflash_local.bench.peers.comparison import Peer, held_against, run_against
from dflash_local.bench.prompts.case import (
    CATEGORIES,
    DEPTHS,
    Case,
    Prompt,
    built_in,
    depth_name,
    long_cases,
    random_cases,
    read_by,
)
from dflash_local.bench.report.report import Report
from dflash_local.bench.synthetic.acceptance import Synthetic, synthetic_engine
from dflash_local.bench.synthetic.recorded import RecordedDrafts
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.errors import InputError
from dflash_local.fit.options import LoadOptions
from dflash_local.fit.plan import Plan
from dflash_local.model import Model

OpenEngine = Callable[[Path, Path | None, LoadOptions], tuple[Engine, Plan]]

CURVE_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64)
_RANDOM_LENGTH = 128
_LONG_LIMIT = 2
"""Prompts for each depth: they are read several times over, which takes its time."""


@dataclass(frozen=True)
class Order:
    """What is to be measured.

    `prompts` None are the built-in ones of `categories`; `random` are drawn token ids instead.
    `depths` None are those of `workload.DEPTHS`, on a CPU the first of them. `loading` are keyword
    arguments of `load`.
    """

    target: Path
    draft: Path | None
    settings: Settings
    command: str
    prompts: Sequence[Prompt] | None = None
    random: bool = False
    categories: tuple[str, ...] = CATEGORIES
    limit: int = 4
    depths: tuple[int, ...] | None = None
    thinking: bool = False
    concurrency: tuple[int, ...] = ()
    synthetic_length: float | None = None
    llama_server: Path | None = None
    server_drafts: tuple[int, ...] = (15,)
    loading: Mapping[str, Any] = field(default_factory=dict)


def benchmark(order: Order, open_engine: OpenEngine, say: Say) -> Report:
    """Measure what is ordered. `open_engine` is `loading.open_engine`; `say` tells of progress.

    Raises InputError where files, prompts and settings do not fit, and what `load` raises.
    """
    order = replace(order, settings=_settings(order), loading=_loading(order))
    if order.synthetic_length is not None:
        RecordedDrafts.shipped().weights(order.synthetic_length)  # refused before any work
    model, restart = _opened(order, order.loading, open_engine)
    with model:
        order, told = _within(model, order)
        cases, notes = _cases(model, order)
        report = Report(
            command=order.command,
            machine=Machine.of(model),
            settings=order.settings,
            rows=run(model, cases, order.settings, say, restart),
            synthetic_length=order.synthetic_length,
            notes=told + notes,
            long_categories=_long_categories(order),
        )
        report.memory = memory_of(model)
        model.forget()
        report.curve = cost_curve(model.target, _curve_rows(model))
        peer = _peer(model, order)
    short = [case for case in cases if case.category not in report.long_categories]
    if order.concurrency and short:
        rows, left_out = _together(order, short, open_engine, say)
        report.concurrency = rows
        report.notes += left_out
    if peer is not None:
        levels = sorted({row.n for row in report.concurrency})
        found = run_against(peer, short or cases, levels, order.settings, say)
        report.peer = held_against(found, report.rows, report.concurrency)
    return report


def _together(
    order: Order, cases: Sequence[Case], open_engine: OpenEngine, say: Say
) -> tuple[list[ConcurrencyRow], list[str]]:
    """On a model of its own: one that is loaded for several sequences need not be the fastest for
    a single one."""
    loading = {**order.loading, "n_seq": max(order.concurrency)}
    model, restart = _opened(order, loading, open_engine)
    with model:
        order, told = _within(model, order)
        rows, notes = run_together(
            model.engine, cases, order.concurrency, order.settings, say, restart
        )
        return rows, [f"several at once: {note}" for note in told] + notes


def _settings(order: Order) -> Settings:
    """Without a drafter there is nothing but plain decoding; of drawn acceptance, no sameness."""
    settings = order.settings
    if order.draft is None:
        settings = replace(settings, ways=())
    if order.synthetic_length is not None:
        settings = replace(settings, compare=False)
    return settings


def _loading(order: Order) -> Mapping[str, Any]:
    """Ready to fork where any drafts are to be trees; chains are measured on the same model."""
    trees = any(way.shape != "chain" for way in order.settings.ways)
    return {**order.loading, "draft_shape": "auto" if trees else "chain"}


def _within(model: Model, order: Order) -> tuple[Order, list[str]]:
    """Without the ways that this pair cannot draft in, and notes on them. Raises InputError where
    none is left, and for a width that no shape has."""
    engine, ways = model.engine, order.settings.ways
    shapes = dict.fromkeys(way.shape for way in ways)
    most = max((engine.widest(shape) for shape in shapes), default=0)
    for width in (way.width for way in ways if way.width != "auto"):
        if width > most:
            what = "this drafter's block" if most == engine.max_width else "the draft trees"
            raise InputError(f"a width of {width} exceeds {what} of {most}: name smaller ones")
    reason = engine.chains_because
    if reason and list(shapes) != ["chain"]:
        ways = tuple(dict.fromkeys(Way(way.width) for way in ways))
    ways = tuple(w for w in ways if w.width == "auto" or w.width <= engine.widest(w.shape))
    order = replace(order, settings=replace(order.settings, ways=ways))
    return order, [reason] if reason and list(shapes) != ["chain"] else []


def _cases(model: Model, order: Order) -> tuple[list[Case], list[str]]:
    depths = order.depths
    if depths is None:
        depths = DEPTHS if model.target.options.n_gpu_layers else DEPTHS[:1]
    room = order.settings.max_tokens
    if order.random:
        lengths = {"random": _RANDOM_LENGTH}
        lengths |= {depth_name(n): n - room for n in order.depths or () if n <= model.n_ctx}
        return random_cases(model.target.n_vocab, lengths, limit=order.limit), []
    prompts, long = order.prompts, order.depths is not None
    if prompts is None:
        shipped = order.target.resolve() == demo.pair()[0].resolve()
        prompts = built_in(order.categories, limit=order.limit, shipped=shipped)
        long = long or "long" in order.categories
    cases, notes = read_by(model, prompts, room=room, thinking=order.thinking)
    if long:
        more, left_out = long_cases(model, depths, limit=min(order.limit, _LONG_LIMIT), room=room)
        cases, notes = cases + more, notes + left_out
    if not cases:
        raise InputError(
            f"no prompt is left to measure: {'; '.join(notes) or 'none was asked for'}"
        )
    return cases, notes


def _long_categories(order: Order) -> tuple[str, ...]:
    return tuple(depth_name(depth) for depth in order.depths or DEPTHS)


def _curve_rows(model: Model) -> list[int]:
    most = max(model.engine.widest(model.draft_shape), 16)
    return [rows for rows in CURVE_ROWS if rows <= min(most, model.n_ctx - 1)]


def _opened(
    order: Order, loading: Mapping[str, Any], open_engine: OpenEngine
) -> tuple[Model, Restart]:
    """A model in which as many drafts are accepted as ordered, or on their merit; and what begins
    each run."""
    engine, plan = open_engine(order.target, order.draft, LoadOptions(**loading))
    if order.synthetic_length is None:
        return Model(engine, plan), begin_anyhow
    n_vocab, ends_text = engine.target.n_vocab, engine.target.vocabulary.ends_text
    synthetic = Synthetic(
        RecordedDrafts.shipped(),
        order.synthetic_length,
        order.settings.seed,
        usable=lambda token: 0 <= token < n_vocab and not ends_text(token),
    )
    return Model(synthetic_engine(engine, synthetic), plan), synthetic.restart


def _peer(model: Model, order: Order) -> Peer | None:
    if order.llama_server is None:
        return None
    return Peer.of(
        model,
        order.llama_server,
        order.draft,
        n_drafts=order.server_drafts,
        synthetic_length=order.synthetic_length,
    )


def ways_from(shapes: Sequence[DraftShape], widths: Sequence[int]) -> tuple[Way, ...]:
    """Each shape with the width that the model chooses, and with those asked for beside it; which
    shape pays best is the model's to choose together with the width."""
    found: list[Width] = ["auto", *widths]
    return tuple(
        dict.fromkeys(
            Way(width, shape)
            for width in found
            for shape in shapes
            if width == "auto" or shape != "auto"
        )
    )
