"""A child process that may die, hang or run out of memory in our place.

The parent's side is `run`. The child's side is a function `main(request)` in a module of its own.
It writes one JSON object a line with `say`: `stage` as a stage begins, then `done` or a `fault`,
which is about the stage that began last, and whatever else the parent wants to know. A child that
ends without either was killed by its last stage.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_QUIET_S = 2.0
# The child gets our own search path: it must find this package whichever way we were found.
_LAUNCH = (
    "import importlib, json, sys; request = json.load(sys.stdin); sys.path[:] = request['path']; "
    "importlib.import_module(request['module']).main(request['request'])"
)
_SIGKILL = 9
_SHORT_OF_MEMORY = re.compile(r"(failed|unable) to allocate|out of memory|bad_alloc", re.IGNORECASE)
_TELLING = (
    re.compile(r"GGML_ASSERT|GGML_ABORT"),
    re.compile(r"what\(\):"),
    re.compile(r"error|fail", re.IGNORECASE),
    re.compile(r"\S"),
)


@dataclass(frozen=True)
class Outcome:
    """How far a child came. `stage` began last; `fault` is what it said of it, or the line of its
    stderr that tells most; `death` is how it ended, if not by itself."""

    stage: str = "import"
    fault: str = ""
    death: str = ""
    done: bool = False
    short: bool = False
    """It was short of time or memory, which another moment may have."""
    said: list[dict[str, Any]] = field(default_factory=list)


def run(
    module: str,
    request: dict[str, Any],
    *,
    limit_s: float,
    on_wait: Callable[[], None] | None = None,
    without_gpu: bool = True,
) -> Outcome:
    """Run `main(request)` of a module in a child process for at most `limit_s` seconds.

    `on_wait` is called once if it takes longer than a moment. `without_gpu`: the child sees no GPU,
    whose memory is not ours to take.
    """
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    environment.pop("PYTHONFAULTHANDLER", None)
    if without_gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    whole = json.dumps({"path": sys.path, "module": module, "request": request}).encode()
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as child:
        try:
            out, err = _output(child, whole, limit_s, on_wait)
        except subprocess.TimeoutExpired:
            child.kill()
            out, _ = child.communicate()
            stage, _, _, said = _report(out)
            return Outcome(stage, f"stopped after {limit_s:.0f} s", short=True, said=said)
        except BaseException:
            child.kill()
            raise
    return _outcome(child.returncode, out, err.decode("utf-8", "replace"))


def say(**fields: Any) -> None:
    """The child's side: one line for the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def die_quietly() -> None:
    """The child's side: no core file and no dialog, as dying is one of the expected answers."""
    if sys.platform == "win32":
        import ctypes

        ctypes.windll.kernel32.SetErrorMode(0x8003)
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_memory(n_bytes: int) -> None:
    """The child's side: no more address space than this, where the system can enforce it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


def on_deep_stack(work: Callable[[], None], n_bytes: int) -> None:
    """Run `work` on a thread with a stack of that size: parsers recurse."""
    thread = threading.Thread(target=work)
    with _stack_size:
        before = threading.stack_size(n_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


_stack_size = threading.Lock()


def _output(
    child: subprocess.Popen[bytes],
    request: bytes,
    limit_s: float,
    on_wait: Callable[[], None] | None,
) -> tuple[bytes, bytes]:
    quiet_s = min(_QUIET_S, limit_s)
    try:
        return child.communicate(request, timeout=quiet_s)
    except subprocess.TimeoutExpired:
        if limit_s <= quiet_s:
            raise
        if on_wait is not None:
            on_wait()
        return child.communicate(timeout=limit_s - quiet_s)


def _outcome(return_code: int, out: bytes, err: str) -> Outcome:
    stage, fault, done, said = _report(out)
    if done:
        return Outcome(stage, done=True, said=said)
    fault = fault or _telling_line(err)
    killed = return_code == -_SIGKILL
    return Outcome(
        stage,
        fault,
        "" if return_code == 0 else _death(return_code),
        short=killed or bool(_SHORT_OF_MEMORY.search(fault)),
        said=said,
    )


def _report(out: bytes) -> tuple[str, str, bool, list[dict[str, Any]]]:
    """Stage begun last, fault, whether all stages passed, and all that the child wrote."""
    stage, fault, done = "import", "", False
    said = []
    for line in out.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
            if isinstance(fields, dict):
                said.append(fields)
                stage = str(fields.get("stage", stage))
                fault = str(fields.get("fault", fault))
                done = done or fields.get("done") is True
    return stage, fault, done, said


def _death(return_code: int) -> str:
    if return_code == -_SIGKILL:
        return "the process was killed, probably for lack of memory"
    if return_code < 0:
        with contextlib.suppress(ValueError):
            return f"the process died by {signal.Signals(-return_code).name}"
    return f"the process ended with code {return_code}"


def _telling_line(err: str) -> str:
    """The line of what a dead process printed that tells most; paths of its sources shortened."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    for pattern in _TELLING:
        for line in reversed(lines):
            if pattern.search(line):
                return re.sub(r"^\S*[/\\](?=[\w.-]+:\d+:)", "", line)[:300]
    return ""
