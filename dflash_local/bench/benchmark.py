"""One run from beginning to end: load, measure plain and drafted, hold against others, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local import demo
from dflash_local.bench.against import Peer, held_against, run_against
from dflash_local.bench.concurrency import ConcurrencyRow, run_together
from dflash_local.bench.machine import Machine, memory_of
from dflash_local.bench.measure import Width, cost_curve
from dflash_local.bench.report import Report
from dflash_local.bench.run import Say, Settings, run
from dflash_local.bench.synthetic import SyntheticVerifier, solve_p
from dflash_local.bench.workload import (
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
from dflash_local.errors import InputError

if TYPE_CHECKING:
    from dflash_local.engine import Engine
    from dflash_local.model import Model

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


def benchmark(order: Order, load: Callable[..., Model], say: Say) -> Report:
    """Measure what is ordered; `load` is `dflash_local.load`, `say` hears of progress.

    Raises InputError where files, prompts and settings do not fit, and what `load` raises.
    """
    order = replace(order, settings=_settings(order))
    if order.synthetic_length is not None and order.loading.get("draft_shape", "chain") != "chain":
        raise InputError(
            "a synthetic accepted length says how chains fare; leave out the draft shape, or "
            "measure trees by what is accepted"
        )
    p = None if order.synthetic_length is None else solve_p(order.synthetic_length)
    with (
        load(order.target, order.draft, **order.loading) as model,
        _accepting(model.engine, p, order.settings.seed),
    ):
        _check_widths(model, order.settings)
        cases, notes = _cases(model, order)
        report = Report(
            command=order.command,
            machine=Machine.of(model),
            settings=order.settings,
            rows=run(model, cases, order.settings, say),
            synthetic_length=order.synthetic_length,
            notes=notes,
            long_categories=_long_categories(order),
        )
        report.memory = memory_of(model)
        model.forget()
        report.curve = cost_curve(model.target, _curve_rows(model))
        peer = _peer(model, order, p)
    short = [case for case in cases if case.category not in report.long_categories]
    if order.concurrency and short:
        rows, left_out = _together(order, short, load, p, say)
        report.concurrency = rows
        report.notes += left_out
    if peer is not None:
        levels = sorted({row.n for row in report.concurrency})
        found = run_against(peer, short or cases, levels, order.settings, say)
        report.peer = held_against(found, report.rows, report.concurrency)
    return report


def _together(
    order: Order, cases: Sequence[Case], load: Callable[..., Model], p: float | None, say: Say
) -> tuple[list[ConcurrencyRow], list[str]]:
    """On a model of its own: one that is loaded for several sequences need not be the fastest for
    a single one."""
    loading = {**order.loading, "n_seq": max(order.concurrency)}
    with (
        load(order.target, order.draft, **loading) as model,
        _accepting(model.engine, p, order.settings.seed),
    ):
        return run_together(model.engine, cases, order.concurrency, order.settings, say)


def _settings(order: Order) -> Settings:
    """Without a drafter there is nothing but plain decoding; of drawn acceptance, no sameness."""
    settings = order.settings
    if order.draft is None:
        settings = replace(settings, widths=())
    if order.synthetic_length is not None:
        settings = replace(settings, compare=False)
    return settings


def _check_widths(model: Model, settings: Settings) -> None:
    most = model.engine.widest(model.draft_shape)
    what = "this drafter's block" if most == model.engine.max_width else "the draft trees"
    for width in settings.widths:
        if width != "auto" and width > most:
            raise InputError(f"a width of {width} exceeds {what} of {most}: name smaller ones")


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


@contextmanager
def _accepting(engine: Engine, p: float | None, seed: int) -> Iterator[None]:
    """Drafts that survive with probability `p` each for as long as this lasts; None: by merit."""
    if p is None:
        yield
        return
    merit, as_they_are = engine.verifier, engine.judge
    ends_text = engine.target.vocabulary.ends_text
    synthetic = SyntheticVerifier(p, seed, ends_text=ends_text)
    engine.verifier, engine.judge = synthetic, synthetic.judge
    try:
        yield
    finally:
        engine.verifier, engine.judge = merit, as_they_are


def _peer(model: Model, order: Order, p: float | None) -> Peer | None:
    if order.llama_server is None:
        return None
    return Peer.of(
        model, order.llama_server, order.draft, n_drafts=order.server_drafts, synthetic_p=p
    )


def widths_from(numbers: Sequence[int]) -> tuple[Width, ...]:
    """ "auto", and the numbers asked for beside it, each once."""
    return ("auto", *dict.fromkeys(numbers))
