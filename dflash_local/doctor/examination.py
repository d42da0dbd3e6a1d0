"""The whole examination: the machine, the files, the memory, and a trial of the loaded pair."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dflash_local.bench.paper import paper_value
from dflash_local.doctor.machine import Machine
from dflash_local.doctor.trial import PairTrial, try_pair, try_target
from dflash_local.doctor.verdict import Alarm, PairNames, alarms, verdict
from dflash_local.errors import DflashError
from dflash_local.fit.inspection import inspect_file
from dflash_local.fit.plan import OWN_HEADS, drafter_name
from dflash_local.gguf.drafter_spec import DrafterSpec, HeadsSpec
from dflash_local.model import Model
from dflash_local.pair import Pair, open_pair
from dflash_local.pairs.defaults import pair_of
from dflash_local.pairs.find import PairFiles

_MADE_FOR = ("general.base_model.0.name", "dflash_local.target")


@dataclass(frozen=True)
class Examination:
    """`verdict` is one line. `pair` and `plan` are None if the files could not be loaded, and
    `trial` where there is no drafter. `plain_speed` is in tokens/s."""

    verdict: str
    alarms: tuple[Alarm, ...]
    machine: Machine
    pair: PairNames | None = None
    plan: tuple[str, ...] = ()
    trial: PairTrial | None = None
    plain_speed: float | None = None

    @property
    def is_well(self) -> bool:
        return not any(alarm.is_fault for alarm in self.alarms)

    def as_dict(self) -> dict[str, Any]:
        told = {**asdict(self), "is_well": self.is_well}
        if self.trial:
            told["trial"]["gain"] = self.trial.gain
        return told


def examine(choose: Callable[[], PairFiles], load: Callable[[PairFiles], Model]) -> Examination:
    """Examine this machine with the pair that `choose` finds and `load` loads.

    Faults of the pair are the verdict; nothing of it is raised, unless it is not a DflashError.
    """
    machine = Machine.here()
    try:
        files = choose()
        with load(files) as model:
            by_heads = files.is_found and model.plan and model.plan.drafter_name == OWN_HEADS
            pair = _names_of(open_pair(files.target, None if by_heads else files.draft))
            plan = tuple(model.plan.lines()) if model.plan else ()
            trial = try_pair(model) if model.drafter else None
            speed = trial.plain_speed if trial else try_target(model)
            few_rows = model.engine.target.few_rows
            faults = few_rows.faults if few_rows else []
    except DflashError as error:
        text = _without_folders(" ".join(str(error).split()))
        found = [Alarm("not_loaded", text), *alarms(machine, None, None)]
        return Examination(text, tuple(found), machine)
    found = alarms(machine, pair, trial, faults)
    return Examination(verdict(found, pair, trial), tuple(found), machine, pair, plan, trial, speed)


def _without_folders(text: str) -> str:
    """The text with the names of files alone: where they lie is the user's own."""
    return re.sub(r"(?:[A-Za-z]:)?[~\w.@+-]*(?:[/\\][\w.@+-]+)*[/\\]([\w.@+-]+\.gguf)", r"\1", text)


def _names_of(pair: Pair) -> PairNames:
    target, draft = pair.target, pair.draft
    facts = inspect_file(target).file
    drafter = inspect_file(draft).file if draft and draft is not target else None
    is_dflash = pair.spec is None or isinstance(pair.spec, DrafterSpec)
    made_for = None
    if drafter:
        told = (drafter.provenance.get(key) for key in _MADE_FOR)
        made_for = next((str(name) for name in told if name), None)
    return PairNames(
        target=target.name,
        drafter=drafter_name(draft, pair.spec),
        target_bytes=facts.n_bytes,
        drafter_bytes=drafter.n_bytes if drafter else 0,
        quantization=facts.quantization,
        target_name=facts.name,
        made_for=made_for,
        is_dflash=is_dflash,
        has_heads=isinstance(pair.spec, HeadsSpec),
        expected=_expected(pair) if is_dflash else None,
    )


def _expected(pair: Pair) -> float | None:
    """Tokens per round that are known of such a pair."""
    known = pair_of(pair.draft)
    if known and known.tokens_per_round:
        return known.tokens_per_round
    published = paper_value("humaneval", pair.target.path.name)
    return published.accepted_length if published else None
