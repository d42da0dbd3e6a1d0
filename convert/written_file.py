"""Is what was written right? Checked on the file itself, before it gets its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dflash_local.draft.trial import try_drafter
from dflash_local.errors import FileError, InputError
from dflash_local.fit.architectures import RECURRENT_ARCHITECTURES, TAPPED_ARCHITECTURES
from dflash_local.fit.pairing import check_pair
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile

from .planned_file import difference
from .source import Source


@dataclass
class Findings:
    """In words: what is right, and what could not be checked or may surprise."""

    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_fit(target: GgufFile | Source, drafter: GgufFile) -> Findings:
    """Do the two belong together? Decided from their headers.

    Raises FileError or PairError when they do not. A target that cannot be drafted for here, as
    llama.cpp offers no taps of it or it cannot be rolled back, is no fault of the drafter's.
    """
    if isinstance(target, Source):
        return Findings([f"sizes and taps fit the config of {target.name}"])
    name = target.architecture
    if name in RECURRENT_ARCHITECTURES or name not in TAPPED_ARCHITECTURES:
        why = "has recurrent layers" if name in RECURRENT_ARCHITECTURES else "offers no taps"
        return Findings(notes=[f"dflash-local cannot draft for this target: {name!r} {why}"])
    check_pair(target, drafter)
    return Findings([f"fits the target {target.path.name}"])


def check_written(part: Path, planned: GgufFile, target: GgufFile | Source) -> Findings:
    """The file `part`, which will get the name `planned.path`. Raises FileError for a bad one, and
    PairError for one that does not fit the target."""
    try:
        written = GgufFile.open(part)
        if fault := difference(planned, written):
            raise FileError(f"{part}: {fault} is not what was to be written")
        spec = read_drafter(written)
        found = check_fit(target, written)
        found.checks.append("keys, tensors and shapes read back")
        tried = try_drafter(part, spec, target.path if isinstance(target, GgufFile) else None)
    except InputError as error:
        told = str(error).replace(str(part), str(planned.path))
        raise type(error)(f"{told}; the file was removed") from None
    found.checks.extend(tried.passed)
    if tried.not_tried:
        found.notes.append(f"not tried in llama.cpp: {tried.not_tried}")
    return found
