"""Is the file right? Its header is checked before writing, the file before it gets its name."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from dflash_local.errors import FileError, InputError
from dflash_local.fit.architectures import rolls_back, takes_drafters
from dflash_local.fit.pairing import check_pair
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.gguf.header import TensorInfo
from dflash_local.trial.drafter import try_drafter

from .key import Key, header
from .quantization import n_bytes
from .tensors.plan import TensorPlan

Tensors = Sequence[tuple[TensorPlan, GGMLQuantizationType]]


@dataclass
class CheckResult:
    """`checks`: facts that are right, in words. `notes`: those unchecked, or that may surprise."""

    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def planned_file(path: Path, keys: Sequence[Key], tensors: Tensors) -> GgufFile:
    """The header that the file at `path` will have. Offsets of tensors count from 0."""
    infos: dict[str, TensorInfo] = {}
    offset = 0
    for plan, kind in tensors:
        size = n_bytes(plan.shape, kind)
        infos[plan.name] = TensorInfo(plan.name, plan.shape, int(kind), kind.name, offset, size)
        offset += size
    return replace(header(path, keys), tensors=infos, n_bytes=offset, shards=(path,))


def check_fit(target: GgufFile, drafter: GgufFile) -> CheckResult:
    """Check that the two belong together, by their headers.

    Raises FileError or PairError when they do not. When the target cannot be drafted for here,
    as llama.cpp offers no taps of it or it cannot be rolled back, a note says so.
    """
    name = target.architecture
    if not takes_drafters(name):
        why = "offers no taps" if rolls_back(name) else "has recurrent layers"
        return CheckResult(notes=[f"dflash-local cannot draft for this target: {name!r} {why}"])
    check_pair(target, drafter)
    return CheckResult([f"fits the target {target.path.name}"])


def check_written(part: Path, planned: GgufFile, target: GgufFile) -> CheckResult:
    """Check the file `part`, which will get the name `planned.path`. It drafts a block for a target
    that is on this disk.

    Raises FileError for a bad one, and PairError for one that does not fit the target.
    """
    try:
        written = GgufFile.open(part)
        if _content(planned) != _content(written):
            raise FileError(f"{part}: its keys and tensors are not those that were to be written")
        spec = read_drafter(written)
        found = check_fit(target, written)
        found.checks.append("keys, tensors and shapes read back")
        tried = try_drafter(part, spec, target.path if target.shards else None)
    except InputError as error:
        told = str(error).replace(str(part), str(planned.path))
        raise type(error)(f"{told}; the file was removed") from None
    found.checks.extend(tried.passed)
    if tried.not_tried:
        found.notes.append(f"not tried in llama.cpp: {tried.not_tried}")
    return found


def _content(file: GgufFile) -> tuple[object, ...]:
    """Keys with their types, and the tensors without their places."""
    shapes = {name: (info.shape, info.type, info.n_bytes) for name, info in file.tensors.items()}
    return file.metadata, file.value_types, shapes
