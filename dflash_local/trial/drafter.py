"""Tries a drafter file once in a child process, as llama.cpp aborts on some bad files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import FileError
from dflash_local.gguf.drafter_spec import DrafterSpec, RopeSpec, ScaleSpec, SelectorSpec
from dflash_local.trial import child
from dflash_local.trial.model_child import loaded

_LIMIT_S = 300.0
_SLOWEST_BYTES_PER_S = 50e6
_TARGET_STAGE = "loading the target"
_N_CELLS = 64
_N_ROWS = 2  # rows of context that the block sees


@dataclass(frozen=True)
class Trial:
    """`passed`: the drafter's abilities, in words. `not_tried`: why not more."""

    passed: tuple[str, ...]
    not_tried: str = ""


def try_drafter(
    path: Path, spec: DrafterSpec, target: Path | None, *, limit_s: float = _LIMIT_S
) -> Trial:
    """Load the drafter at `path` in llama.cpp and in our own graph.

    llama.cpp checks keys, vocabulary and tensors, but does not load drafters with biases. With a
    GGUF `target`, our own graph drafts a block. Raises FileError if one of them refuses the file or
    dies on it. A lack of memory or time is not an error of the file.
    """
    request = {
        "drafter": str(path),
        "target": str(target) if target else None,
        "spec": asdict(spec),
    }
    for file in (path, *([target] if target else [])):
        limit_s += file.stat().st_size / _SLOWEST_BYTES_PER_S
    outcome = child.run("dflash_local.trial.drafter", request, limit_s=limit_s)
    passed = tuple(str(line["passed"]) for line in outcome.said if "passed" in line)
    if outcome.done:
        return Trial(passed)
    why = ", ".join(part for part in (outcome.death, outcome.fault) if part)
    stage = "importing llama.cpp" if outcome.stage == "import" else outcome.stage
    if outcome.short or stage in ("importing llama.cpp", _TARGET_STAGE):
        return Trial(passed, f"{stage}: {why}")
    raise FileError(f"{path}: {stage} failed: {why}")


def main(request: dict[str, Any]) -> None:
    """For the child: run all stages for `request`, which `try_drafter` makes."""
    child.answer(_stages, request)


def _stages(request: dict[str, Any]) -> None:
    from dflash_local.llama import runtime

    runtime.init()
    spec = _spec(request["spec"])
    if not spec.attention_bias:
        with _stage("loading by llama.cpp", "llama.cpp takes its keys, vocabulary and tensors"):
            _model(request["drafter"], no_alloc=True)
    if request["target"] is None:
        return
    child.say(stage=_TARGET_STAGE)
    model = _model(request["target"])
    with _stage("drafting in the fused graph", "the fused graph drafts a block"):
        _draft_fused(request["drafter"], spec, model)


def _spec(fields: dict[str, Any]) -> DrafterSpec:
    selector = fields["selector"] and SelectorSpec(**fields["selector"])
    rope, scales = RopeSpec(**fields["rope"]), ScaleSpec(**fields["scales"])
    return DrafterSpec(**{**fields, "rope": rope, "scales": scales, "selector": selector})


def _model(path: str, *, no_alloc: bool = False) -> Any:
    """A loaded model. Its weights stay in the file; with `no_alloc` they are not read at all."""
    import llama_cpp

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    # rearranged weights would be a copy in memory
    params.use_extra_bufts = False
    if no_alloc:
        params.no_alloc = True
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE  # it asserts that nothing is mapped
    return loaded(os.fsencode(path), params)


def _draft_fused(path: str, spec: DrafterSpec, model: Any) -> None:
    import numpy as np

    from dflash_local.llama import native

    drafter = native.FusedDrafter(model, None, path, spec, 1, _N_CELLS, 1, child.n_threads())
    features = np.zeros((_N_ROWS, spec.n_features), np.float32)
    drafter.begin([0], [features], [0], spec.n_draft)
    drafter.read()


@contextmanager
def _stage(name: str, passed: str) -> Iterator[None]:
    child.say(stage=name)
    yield
    child.say(passed=passed)
