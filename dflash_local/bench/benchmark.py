"""One run from beginning to end: load, measure plain and drafted, report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_local.bench.measure.concurrent import ConcurrencyRow, measure_concurrent
from dflash_local.bench.measure.settings import RunSettings, Say
from dflash_local.bench.measure.single import Pace, by_category
from dflash_local.bench.prompts.case import (
    DEPTHS,
    Case,
    depth_lengths,
    depth_name,
    long_cases,
    tokenized,
)
from dflash_local.bench.prompts.prompt import USUAL, BenchPrompt, built_in
from dflash_local.bench.report.report import Environment, Report
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.errors import DflashError, InputError
from dflash_local.fit.options import LoadOptions
from dflash_local.fit.plan import Plan
from dflash_local.model import Model
from dflash_local.pair import open_pair

OpenEngine = Callable[[Path, Path | None, LoadOptions], tuple[Engine, Plan]]

_LONG_LIMIT = 2
"""Prompts for each depth: they are read several times over, which takes long."""


@dataclass(frozen=True)
class BenchOptions:
    """The settings of one run.

    `prompts`: None for the built-in ones of `categories`. `depths`: None for those of
    `case.DEPTHS`, on a CPU only the first of them. `loading` are keyword arguments of `load`.
    """

    target: Path
    draft: Path | None
    settings: RunSettings
    command: str
    prompts: Sequence[BenchPrompt] | None = None
    categories: tuple[str, ...] = USUAL
    limit: int = 4
    depths: tuple[int, ...] | None = None
    thinking: bool = False
    concurrency: tuple[int, ...] = ()
    loading: Mapping[str, Any] = field(default_factory=dict)


class Benchmark:
    """One run. `lab/bench/run.py` derives from it and measures more."""

    def __init__(self, options: BenchOptions, open_engine: OpenEngine, say: Say) -> None:
        """`open_engine` is `loading.open_engine`; `say` is called with lines on the progress.
        Raises FileError, PairError."""
        self.pair = open_pair(options.target, options.draft)
        settings = self.suited(options.settings, options)
        self.options = replace(options, settings=settings, loading=_loading(options, settings))
        self._open_engine = open_engine
        self.say = say

    def run(self) -> Report:
        """Measure. A KeyboardInterrupt ends it with the measurements until then, if there are any;
        so does a failure after one request at a time was measured.

        Raises InputError if files, prompts and settings do not fit, and as `load`.
        """
        with Model(*self.engine(self.options.loading)) as model:
            settings, told = _possible(model, self.options.settings)
            self.options = replace(self.options, settings=settings)
            cases, notes = self.cases(model)
            report = self.report(model, told + notes)
            try:
                for rows in by_category(model, cases, self.options.settings, Pace(self.say)):
                    report.rows += rows
            except KeyboardInterrupt:
                if not report.rows:
                    raise
                return self._interrupted(report)
            self.measured_alone(model, report)
        try:
            self.measure_others(report, cases)
        except KeyboardInterrupt:
            self._interrupted(report)
        except DflashError as failure:
            report.failure = failure
            report.notes.append(f"not all was measured: {failure}")
        return report

    def _interrupted(self, report: Report) -> Report:
        report.interrupted = True
        self.say("interrupted: what follows was measured until then")
        return report

    # What a run of another kind does in its own way

    def suited(self, settings: RunSettings, options: BenchOptions) -> RunSettings:
        """The settings, as the files allow them: without drafts there is only plain decoding."""
        return settings if self.pair.draft else replace(settings, variants=())

    def engine(self, loading: Mapping[str, Any]) -> tuple[Engine, Plan]:
        options = self.options
        return self._open_engine(options.target, options.draft, LoadOptions(**loading))

    def cases(self, model: Model) -> tuple[list[Case], list[str]]:
        """The prompts, at least one, and notes on those that are left out. Raises InputError."""
        options, room = self.options, self.options.settings.max_tokens
        prompts, depths = options.prompts, options.depths
        if prompts is None:
            prompts = built_in(options.categories, limit=options.limit)
            if depths is None and "long" in options.categories:
                depths = DEPTHS if model.target.options.n_gpu_layers else DEPTHS[:1]
        lengths, left_out = depth_lengths(depths or (), n_ctx=model.n_ctx, room=room)
        cases, notes = tokenized(model, prompts, room=room, thinking=options.thinking)
        cases += long_cases(model, lengths, limit=min(options.limit, _LONG_LIMIT))
        notes += left_out
        if not cases:
            raise InputError(
                f"no prompt is left to measure: {'; '.join(notes) or 'none was asked for'}"
            )
        return cases, notes

    def report(self, model: Model, notes: list[str]) -> Report:
        return Report(**self.heading(model, notes))

    def heading(self, model: Model, notes: list[str]) -> dict[str, Any]:
        options = self.options
        return {
            "command": options.command,
            "environment": Environment.of(model),
            "settings": options.settings,
            "notes": notes,
            "long_categories": tuple(depth_name(depth) for depth in options.depths or DEPTHS),
        }

    def measured_alone(self, model: Model, report: Report) -> None:
        """Called with the model of single requests when these are measured."""

    def measure_others(self, report: Report, cases: Sequence[Case]) -> None:
        short = self.short_cases(report, cases)
        if self.options.concurrency and not short:
            report.notes.append("several at once: left out, as there are only long prompts")
        elif self.options.concurrency:
            report.concurrency, left_out = self._concurrent(short)
            report.notes += left_out

    @staticmethod
    def short_cases(report: Report, cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if case.category not in report.long_categories]

    def _concurrent(self, cases: Sequence[Case]) -> tuple[list[ConcurrencyRow], list[str]]:
        """On a model of its own: one for several sequences may be slower for a single one."""
        options = self.options
        loading = {**options.loading, "n_seq": max(options.concurrency)}
        with Model(*self.engine(loading)) as model:
            settings, told = _possible(model, options.settings)
            rows, notes = measure_concurrent(
                model.engine, cases, options.concurrency, settings, self.say
            )
            return rows, [f"several at once: {note}" for note in told] + notes


def _loading(options: BenchOptions, settings: RunSettings) -> Mapping[str, Any]:
    """Ready for trees where any drafts are to be trees; chains are measured on the same model. With
    a width the drafter stays loaded, whether drafting can pay or not; the largest is refused before
    anything is loaded if no pass can be so wide."""
    variants = settings.variants
    shape = "auto" if any(variant.shape != "chain" for variant in variants) else "chain"
    width = max((each.width for each in variants if each.width != "auto"), default=2)
    return {**options.loading, "draft_shape": shape, "draft_width": width}


def _possible(model: Model, settings: RunSettings) -> tuple[RunSettings, list[str]]:
    """The settings without the variants that this pair cannot draft, and notes on them. Raises
    InputError if none is left, and for a width that no shape has."""
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
