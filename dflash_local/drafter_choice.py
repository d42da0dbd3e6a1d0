"""The faster one of a target's own heads and a drafter, where nobody has named one: measured once
on this machine."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from time import perf_counter
from typing import Any

from dflash_local import disk_cache
from dflash_local.bench.prompts.case import tokenized
from dflash_local.bench.prompts.prompt import USUAL, BenchPrompt, built_in
from dflash_local.controller.calibration import BUDGET_S, budget_s
from dflash_local.engine.engine import Engine
from dflash_local.errors import BackendError, DflashError, FileError, PairError
from dflash_local.fit.options import HEADS, LoadOptions
from dflash_local.fit.plan import OWN_HEADS, Plan
from dflash_local.gguf.file import file_key
from dflash_local.llama import runtime
from dflash_local.model import Model
from dflash_local.pair import Pair, open_pair
from dflash_local.pairs.find import PairFiles
from dflash_local.result import Result
from dflash_local.setup import NO_HEADS, Setup, machine_devices
from dflash_local.stats import Stats

Say = Callable[[str], None]
OpenEngine = Callable[[Pair, LoadOptions], tuple[Engine, Plan]]

N_TOKENS = 48
"""Of each answer."""
_WARM_UP_S, _LONGEST_S = 1.0, 10.0
"""Of the answer that does not count, and of all with one of them. With less, a machine of two
tokens a second tells nothing."""
_LEAST = 12
"""Tokens of each. Fewer are a few rounds, in which chance decides."""
_KIND, _FORMAT = "choices", 1
_NOT_MEASURED: dict[str, Any] = {
    **{"cache_mb": 0, "cache_dir": None, "slot_save_path": None},
    **{"draft_from": None, "mmproj": None, "draft_width": None},
}
"""Settings that the speeds do not depend on, as they are while these are measured."""
_MEASURING = (
    "the target's file has heads, and there is a drafter, too: measuring once which of them is "
    "faster here, which takes some seconds"
)
_NO_DRAFTER = "the drafter is not used:"
_TOO_SLOW = (
    f"the drafter drafts: the few tokens of {_LONGEST_S:g} seconds do not tell whether the "
    "target's own heads are faster; 'mtp' in the drafter's place asks for them"
)


@dataclass(frozen=True)
class Speeds:
    """Tokens/s of the same greedy answers with the heads and with the drafter, and the day of the
    measurement."""

    heads: float
    drafter: float
    day: str

    @classmethod
    def of(cls, heads: Sequence[Stats], drafter: Sequence[Stats]) -> "Speeds":
        """The speeds over the answers that both have given; 0 if these are too short to tell."""
        n, day = min(len(heads), len(drafter)), date.today().isoformat()
        by_heads, by_drafter = Stats.sum(heads[:n]), Stats.sum(drafter[:n])
        if min(by_heads.emitted, by_drafter.emitted) < _LEAST:
            return cls(0.0, 0.0, day)
        return cls(by_heads.tokens_per_second, by_drafter.tokens_per_second, day)

    @property
    def heads_win(self) -> bool:
        return self.heads > self.drafter

    @property
    def line(self) -> str:
        """The choice in words."""
        if not self.drafter:
            return f"{_TOO_SLOW} (measured on {self.day}; calibrate measures again)"
        ways = [(self.drafter, "the drafter"), (self.heads, OWN_HEADS)]
        (most, best), (least, other) = ways[::-1] if self.heads_win else ways
        return (
            f"drafting with {best}: {most:.1f} tokens/s, with {other} {least:.1f} (measured once "
            f"on {self.day})"
        )


def choose(
    files: PairFiles, options: LoadOptions, say: Say, open_engine: OpenEngine | None
) -> tuple[PairFiles, str | None]:
    """The files, without a drafter that nobody named where the target's own heads are faster; and
    the reason in a line, if there was a choice.

    Without `open_engine`, which opens a pair, nothing is measured, nor with a calibration budget
    below the usual one. The drafter is kept then, unless it is known to be slower. What cannot be
    loaded, or fails, is not used, and `say` gets the reason. Raises FileError for a bad target.
    """
    width = options.draft_width
    if not files.is_found or width in (0, 1):
        return files, None
    try:
        heads = open_pair(files.target, HEADS).with_keys(options.override_kv)
    except PairError:
        return files, None
    if isinstance(width, int) and heads.spec and width > heads.spec.n_draft + 1:
        return files, None
    target_only = PairFiles(files.target, None)
    try:
        drafter = open_pair(files.target, files.draft).with_keys(options.override_kv)
    except (FileError, PairError) as fault:
        say(f"{_NO_DRAFTER} {fault}")
        return target_only, None
    again, options = options.recalibrate, replace(options, **_NOT_MEASURED, recalibrate=False)
    try:
        key = _key(heads, drafter, options)
    except DflashError:  # a load tells it
        return files, None
    speeds = None
    if not again:
        with suppress(TypeError):  # not measured yet
            speeds = Speeds(**disk_cache.read(_KIND, key))
    if speeds is None:
        if open_engine is None or budget_s() < BUDGET_S:
            return files, None
        say(_MEASURING)
        found = []
        for pair, why in ((heads, NO_HEADS), (drafter, _NO_DRAFTER)):
            try:
                with Model(*open_engine(pair, options)) as model:
                    found.append([result.stats for result in answers(model)])
            except DflashError as fault:
                say(f"{why} {fault}")
                return files if pair is heads else target_only, None
        speeds = Speeds.of(*found)
        disk_cache.write(_KIND, key, asdict(speeds))
    say(speeds.line)
    return target_only if speeds.heads_win else files, speeds.line


def answers(model: Model) -> list[Result]:
    """Greedy answers to built-in prompts, drafted as the controller wants it, as far as there is
    time. Raises BackendError if the drafter fails, and as `Model.generate`."""
    prompts = built_in(USUAL, limit=2)
    prompts = prompts[::2] + prompts[1::2]  # of each kind one, if there is time for two
    if model.target.chat_template is None:
        prompts = [BenchPrompt(each.category, each.messages[0]["content"]) for each in prompts]
    cases, _ = tokenized(model, prompts, room=N_TOKENS)
    found: list[Result] = []
    end_s = perf_counter() + _LONGEST_S
    for case in [*cases[:1], *cases]:  # the first one twice, as a GPU makes its graphs in it
        left_s = end_s - perf_counter() if found else _WARM_UP_S
        if left_s <= 0:
            break
        model.forget()
        found.append(
            model.generate(case.tokens, max_tokens=N_TOKENS, temperature=0.0, deadline_s=left_s)
        )
    if failure := model.engine.slots.failure:
        raise BackendError(failure)
    return found[1:]


def _key(heads: Pair, drafter: Pair, options: LoadOptions) -> dict[str, Any]:
    """All that the speeds depend on, with what a load would put where now. No new option can be
    forgotten here."""
    settings = asdict(options)
    for name in ("n_ctx", "recalibrate", "load_mode"):
        del settings[name]
    files = [file_key(file.path) for file in (heads.target, drafter.draft) if file]
    devices = machine_devices(options)
    plans = [Setup(pair, options, devices).fitting().plan for pair in (heads, drafter)]
    places = [[p.n_cpu_moe, *(gpu.layers for gpu in p.gpus)] for p in plans]
    own = {"files": files, "options": settings, "places": places}
    return {"format": _FORMAT, "machine": runtime.machine(), **own}
