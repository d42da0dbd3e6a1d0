"""A written drafter, loaded once in a child process: llama.cpp aborts on what it does not like.

The child writes one JSON object a line: `{"stage": words}` as a stage begins, `{"passed": words}`
as it ends well, at last `{"done": true}` or `{"fault": text}`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.drafter_spec import DrafterSpec
from dflash_local.errors import FileError

from .trial_child import TARGET_STAGE

_IMPORT = "importing llama.cpp"
_LIMIT_S = 300.0
_SLOWEST_BYTES_PER_S = 50e6
# the child gets our own search path: it must find this package whichever way we were found
_LAUNCH = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from dflash_local.convert.trial_child import main; main(request)"
)
_SIGKILL = 9
_SHORT_OF_MEMORY = ("failed to allocate", "unable to allocate", "out of memory", "bad_alloc")


@dataclass(frozen=True)
class Trial:
    """`passed`: what the drafter was able to do, in words. `not_tried`: why not more."""

    passed: tuple[str, ...]
    not_tried: str = ""


def try_drafter(
    path: Path, spec: DrafterSpec, target: Path | None, *, limit_s: float = _LIMIT_S
) -> Trial:
    """Have llama.cpp, and our own graph where it knows the family, load the drafter at `path`.

    llama.cpp checks keys, vocabulary and tensors; with a GGUF `target` each drafts a block, too.
    A drafter with biases, which llama.cpp does not load, is tried in our own graph alone. Raises
    FileError when one of them refuses the file or dies on it. Want of memory or time is no fault of
    the file's.
    """
    request = {
        "path": sys.path,
        "drafter": str(path),
        "target": str(target) if target else None,
        "fused": spec.runs_on == "fused",
        "llama_cpp": not spec.attention_bias,
        "block_size": spec.block_size,
        "n_draft": spec.n_draft,
        "n_features": spec.n_taps * spec.n_embd,
        "mask_token_id": spec.mask_token_id,
        "causal": spec.causal,
        "lattice": spec.selector is not None,
    }
    for file in (path, *([target] if target else [])):
        limit_s += file.stat().st_size / _SLOWEST_BYTES_PER_S
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }  # their memory is not ours
    environment.pop("PYTHONFAULTHANDLER", None)
    try:
        child = subprocess.run(
            [sys.executable, "-c", _LAUNCH, json.dumps(request)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return _not_finished(error.stdout or b"", f"stopped after {limit_s:.0f} s")
    return _verdict(path, child)


def _verdict(path: Path, child: subprocess.CompletedProcess[bytes]) -> Trial:
    told = _report(child.stdout)
    if told.get("done"):
        return Trial(tuple(told["passed"]))
    lines = child.stderr.decode("utf-8", "replace").strip().splitlines()
    fault = str(told.get("fault") or (lines[-1] if lines else ""))[:300]
    if child.returncode == -_SIGKILL:
        return _not_finished(child.stdout, "the process was killed, probably for want of memory")
    if child.returncode < 0:
        died = f"the process died by {signal.Signals(-child.returncode).name}"
        fault = f"{died}, {fault}" if fault else died
    short = any(words in fault.lower() for words in _SHORT_OF_MEMORY)
    if short or told["stage"] in (_IMPORT, TARGET_STAGE):
        return _not_finished(child.stdout, fault)
    raise FileError(f"{path}: {told['stage']} failed: {fault}")


def _not_finished(out: bytes, why: str) -> Trial:
    told = _report(out)
    return Trial(tuple(told["passed"]), f"{told['stage']}: {why}")


def _report(out: bytes) -> dict[str, Any]:
    """The stage that began last, all that passed, and the end."""
    told: dict[str, Any] = {"stage": _IMPORT, "passed": []}
    for line in out.decode("utf-8", "replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):
            told["passed"] += [said.pop("passed")] if "passed" in said else []
            told |= said
    return told
