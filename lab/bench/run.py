"""A run that can do more: random weights, given answers, llama-server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_local.bench.benchmark import Benchmark, BenchOptions, OpenEngine
from dflash_local.bench.measure.settings import RunSettings, Say, Variant
from dflash_local.bench.prompts.case import Case, depth_lengths
from dflash_local.bench.report.report import Report
from dflash_local.engine.engine import Engine
from dflash_local.fit.plan import Plan
from dflash_local.model import Model
from lab.bench.comparison import (
    OpenServer,
    beside_ours,
    measure_server,
    server_like,
    whole_chain,
)
from lab.bench.cost_curve import cost_curve
from lab.bench.memory import MemoryUse
from lab.bench.random_cases import random_cases, with_random_answers
from lab.bench.report import LabReport
from lab.replay.drafts import ReplayedDrafts
from lab.replay.engine import ReplayEngine

CURVE_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128)
_RANDOM_LENGTH = 128


@dataclass(frozen=True)
class LabOptions(BenchOptions):
    """`random`: random token ids in place of prompts. `replay` names where the answers of `prompts`
    come from, if they are to come out."""

    random: bool = False
    replay: str | None = None
    synthetic_length: float | None = None
    llama_server: Path | None = None
    server_drafts: tuple[int, ...] = (15,)


class LabBenchmark(Benchmark):
    """Measures a pass of the target by its rows, memory, and llama-server, too."""

    options: LabOptions

    def __init__(self, options: LabOptions, open_engine: OpenEngine, say: Say) -> None:
        super().__init__(options, open_engine, say)
        self._drafts = None
        if options.synthetic_length is not None:
            self._drafts = ReplayedDrafts(
                options.synthetic_length, options.settings.seed, whole_chain(self.pair)
            )
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._server: OpenServer | None = None

    def suited(self, settings: RunSettings, options: BenchOptions) -> RunSettings:
        """Without a drafter or heads there is only plain decoding; in a replay copies, too, whose
        gain it shows. With synthetic acceptance, answers cannot be compared, and those of a replay
        need not be: they are long, and measured from empty caches."""
        assert isinstance(options, LabOptions)
        if self.pair.draft is None:
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

    def engine(self, loading: Mapping[str, Any]) -> tuple[Engine, Plan]:
        """The engine; one that replays answers, if given ones are to come out."""
        engine, plan = super().engine(loading)
        if self.options.replay is None and self._drafts is None:
            return engine, plan
        if self.options.replay is None:
            engine.copies = None  # a random answer repeats nothing
        return ReplayEngine(engine, self._answers, self._drafts), plan

    def cases(self, model: Model) -> tuple[list[Case], list[str]]:
        options, room = self.options, self.options.settings.max_tokens
        if options.random and options.replay is None:
            lengths, notes = depth_lengths(options.depths or (), n_ctx=model.n_ctx, room=room)
            lengths = {"random": _RANDOM_LENGTH} | lengths
            cases = random_cases(model.target.n_vocab, lengths, limit=options.limit)
        else:
            cases, notes = super().cases(model)
        if options.synthetic_length is not None and options.replay is None:
            cases = with_random_answers(model.target, cases, min(room, model.n_ctx))
        self._answers |= {tuple(case.tokens): case.answer for case in cases if case.answer}
        if options.replay is not None:
            longest = max(map(len, self._answers.values()))
            settings = replace(options.settings, max_tokens=min(room, longest))
            self.options = replace(options, settings=settings)
        return cases, notes

    def report(self, model: Model, notes: list[str]) -> LabReport:
        options = self.options
        return LabReport(
            **self.heading(model, notes),
            synthetic_length=options.synthetic_length,
            replay=options.replay,
        )

    def measured_alone(self, model: Model, report: Report) -> None:
        assert isinstance(report, LabReport)
        report.memory = MemoryUse.of(model)
        model.forget()
        most = min(max(model.target.max_width, 16), model.n_ctx - 1, model.target.n_batch)
        report.curve = cost_curve(model.target, [n for n in CURVE_ROWS if n <= most])
        options = self.options
        if options.llama_server is not None:
            self._server = server_like(
                model,
                options.llama_server,
                self.pair,
                synthetic_length=options.synthetic_length,
            )

    def measure_others(self, report: Report, cases: Sequence[Case]) -> None:
        """Several requests at once, and llama-server."""
        assert isinstance(report, LabReport)
        super().measure_others(report, cases)
        if self._server is not None:
            options = self.options
            n_drafts = (0, *(options.server_drafts if self.pair.draft else ()))
            levels = sorted({row.concurrency for row in report.concurrency})
            short = self.short_cases(report, cases) or cases
            found = measure_server(
                self._server, n_drafts, short, levels, options.settings, self.say
            )
            report.server = beside_ours(found, report.rows, report.concurrency)
