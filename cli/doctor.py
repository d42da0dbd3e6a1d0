"""`dflash-local doctor`: does this machine, with this pair, work as it should?"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dflash_local.errors import FileError

from .answer import write_json, write_report
from .loading import check_files, chosen_files, load_model
from .options import FILES, JSON, LOADING, QUIET, SectionedCommand, in_options
from .report import byte_size, table
from .terminal import Speaker
from .values import utf8_text

if TYPE_CHECKING:
    from dflash_local.doctor.examination import Examination
    from dflash_local.model import Model
    from dflash_local.pairs.find import PairFiles

SICK = 1

SECTIONS = {"Model": FILES, "Output": (JSON, QUIET), "Machine": LOADING}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("pair", type=utf8_text, required=False)
def doctor(pair: str | None, **values: Any) -> int:
    """Tell whether this machine and a pair work as they should.

    PAIR is what --target takes. Without it, that of --target is examined, or smollm2-135m. It
    finds GPU and driver, and whether llama.cpp was built for them, plans the memory, loads the pair
    and asks it three built-in questions, with drafts and without. A target alone is asked, too. The
    first line is the verdict; the facts below it name neither you nor your folders, so that they
    can be pasted into an issue.

    The exit code is 0 if all is well, 1 if something is wrong.
    """
    if pair is not None:
        values["target"] = pair
    with suppress(FileError):  # that is for the verdict
        check_files(values)
    from dflash_local.doctor.examination import examine

    say = Speaker(values["quiet"])

    def load(files: PairFiles) -> Model:
        model = load_model(values, say, files)
        say.quiet = True  # what the model would say of drafting is for the verdict
        return model

    found = examine(partial(chosen_files, values, say), load)
    if values["as_json"]:
        write_json(found.as_dict())
    else:
        write_report("\n".join(_lines(found)) + "\n")
    return 0 if found.is_well else SICK


def _lines(found: Examination) -> list[str]:
    machine, trial, pair = found.machine, found.trial, found.pair
    lines = [in_options(found.verdict), ""]
    lines += [
        f"also: {in_options(alarm.text)}" for alarm in found.alarms if alarm.text != found.verdict
    ]
    rows = [
        ("dflash-local", f"{machine.dflash_local}, Python {machine.python}, {machine.system}"),
        ("llama.cpp", machine.llama_cpp),
        *(("device", device) for device in machine.devices),
        ("GPU", ", ".join(machine.gpus) or "none found"),
        ("memory", f"{byte_size(machine.memory_free)} free"),
    ]
    if machine.disk_free is not None:
        rows.append(("disk", f"{byte_size(machine.disk_free)} free"))
    if pair:
        quantization = f", {pair.quantization}" if pair.quantization else ""
        rows += [("target", f"{pair.target}, {byte_size(pair.target_bytes)}{quantization}")]
        if pair.drafter:
            made_for = f", for {pair.made_for}" if pair.made_for else ""
            size = f", {byte_size(pair.drafter_bytes)}" if pair.drafter_bytes else ""
            drafter = f"{pair.drafter}{size}{made_for}"
            rows.append(("drafter", drafter))
    rows += [
        ("plan", line) for line in found.plan if line.startswith(("context", "memory", "note"))
    ]
    if trial:
        each = ", ".join(f"{length:.2f}" for length in trial.by_prompt)
        expected = f"; {pair.expected:.2f} expected" if pair and pair.expected else ""
        per_round = f"{trial.tokens_per_round:.2f} ({each}{expected})"
        rows.append(("tokens per round", per_round))
        if trial.thinking_tokens_per_round is not None:
            rows.append(("with thinking", f"{trial.thinking_tokens_per_round:.2f}"))
        rows.append(("speed", f"{trial.speed:.1f} tokens/s, plain {trial.plain_speed:.1f}"))
    elif found.plain_speed:
        rows.append(("speed", f"{found.plain_speed:.1f} tokens/s"))
    return [*lines, table(rows)]
