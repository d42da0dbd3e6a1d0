"""Tries a drafter file once in a child process, as llama.cpp aborts on some bad files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_local.errors import FileError
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.trial import child
from dflash_local.trial.drafter_child import TARGET_STAGE

_LIMIT_S = 300.0
_SLOWEST_BYTES_PER_S = 50e6


@dataclass(frozen=True)
class Trial:
    """`passed`: what the drafter was able to do, in words. `not_tried`: why not more."""

    passed: tuple[str, ...]
    not_tried: str = ""


def try_drafter(
    path: Path, spec: DrafterSpec, target: Path | None, *, limit_s: float = _LIMIT_S
) -> Trial:
    """Load the drafter at `path` in llama.cpp and in our own graph.

    llama.cpp checks keys, vocabulary and tensors. With a GGUF `target`, each also drafts a block. A
    drafter with biases, which llama.cpp does not load, is tried only in our own graph. Raises
    FileError if one of them refuses the file or dies on it. A lack of memory or time is not an
    error of the file.
    """
    request = {
        "drafter": str(path),
        "target": str(target) if target else None,
        "spec": asdict(spec),
    }
    for file in (path, *([target] if target else [])):
        limit_s += file.stat().st_size / _SLOWEST_BYTES_PER_S
    outcome = child.run("dflash_local.trial.drafter_child", request, limit_s=limit_s)
    passed = tuple(str(line["passed"]) for line in outcome.said if "passed" in line)
    if outcome.done:
        return Trial(passed)
    why = ", ".join(part for part in (outcome.death, outcome.fault) if part)
    stage = "importing llama.cpp" if outcome.stage == "import" else outcome.stage
    if outcome.short or stage in ("importing llama.cpp", TARGET_STAGE):
        return Trial(passed, f"{stage}: {why}")
    raise FileError(f"{path}: {stage} failed: {why}")
