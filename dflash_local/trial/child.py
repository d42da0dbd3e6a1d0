"""Runs work in a child process, which may die, hang or run out of memory in our place.

The parent calls `run`, or keeps a `WarmChild` for many requests. The child runs a function
`main(request)` in a module of its own. With `say` it writes one JSON object per line: `stage` when
a stage begins, and at the end `done` or a `fault` of the last stage. It may also write other things
that the parent wants to know. A child that ends without `done` or `fault` was killed by its last
stage.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_local.errors import DflashError

_QUIET_S = 2.0
_MOST_IDLE = 2
# The child gets our own search path, so that it finds this package just as we did.
_LAUNCH = """
import signal, sys
is_warm = sys.argv[1:] == ["warm"]
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    # They reach all processes of a terminal or a service. A warm child ends with its parent.
    if is_warm and hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
import importlib, json
start = json.loads(sys.stdin.readline())
sys.path[:] = start["path"]
main = importlib.import_module(start["module"]).main
if is_warm:
    print('{"done": true}', flush=True)
for line in sys.stdin:
    main(json.loads(line))
"""
_START_S = 60.0
_SECRET = re.compile(r"_(KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)
"""Of the names of variables that are none of a child's business."""
_SIGKILL = 9
_SHORT_OF_MEMORY = re.compile(r"(failed|unable) to allocate|out of memory|bad_alloc", re.IGNORECASE)
_TELLING = (
    re.compile(r"GGML_ASSERT|GGML_ABORT"),
    re.compile(r"what\(\):"),
    re.compile(r"error|fail", re.IGNORECASE),
    re.compile(r"\S"),
)


@dataclass(frozen=True)
class ChildOutcome:
    """The progress of a child. `stage` is the last one that began. `fault` is the child's report
    about it, or the most telling line of its stderr. `death` is how it died, if it did."""

    stage: str = "import"
    fault: str = ""
    death: str = ""
    done: bool = False
    short: bool = False
    """It lacked time or memory, so another try may succeed."""
    said: list[dict[str, Any]] = field(default_factory=list)


def run(
    module: str,
    request: dict[str, Any],
    *,
    limit_s: float,
    on_wait: Callable[[], None] | None = None,
    without_gpu: bool = True,
) -> ChildOutcome:
    """Run `main(request)` of a module in a child process for at most `limit_s` seconds.

    `on_wait` is called once if it takes longer than a moment. `without_gpu` hides GPUs from the
    child, so that it takes none of their memory.
    """
    with _popen(without_gpu, subprocess.PIPE) as child:
        try:
            whole = _start_line(module) + _line(request)
            out, err = _output(child, whole, limit_s, on_wait)
        except subprocess.TimeoutExpired:
            child.kill()
            out, _ = child.communicate()
            fault = f"stopped after {limit_s:.0f} s"
            return replace(_report(out), fault=fault, done=False, short=True)
        except BaseException:
            child.kill()
            raise
    return _outcome(child.returncode, out, err.decode("utf-8", "replace"))


class WarmChild:
    """A child that answers one request after the other, without a start in between. It sees no GPU.

    For one thread at a time. The process ends with ours, or once nothing refers to this.
    """

    def __init__(self, module: str) -> None:
        self._process = _popen(True, subprocess.DEVNULL, "warm")
        weakref.finalize(self, _end, self._process, os.getpid())
        self._exchange(_start_line(module), _START_S)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], *, limit_s: float) -> ChildOutcome:
        """The outcome of `main(request)`, up to `done` or a `fault`. A child that takes longer than
        `limit_s` seconds is ended."""
        return self._exchange(_line(request), limit_s)

    def _exchange(self, line: bytes, limit_s: float) -> ChildOutcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        # Whatever we wait for, to write or to read, ends when the process does.
        timer = threading.Timer(limit_s, stop)
        timer.daemon = True
        timer.start()
        out = b""
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            for said in self._process.stdout:
                out += said
                outcome = _outcome(0, out, "")
                if outcome.done or outcome.fault:
                    return outcome
        except OSError:
            pass  # it died before it had read all
        except BaseException:
            # Or its answer would be taken for that to the next request.
            self._process.kill()
            self._process.wait()
            raise
        finally:
            timer.cancel()
        code = self._process.wait()
        if late.is_set():
            return ChildOutcome(fault=f"stopped after {limit_s:g} s", short=True)
        return _outcome(code, out, "")


class WarmChildren:
    """Warm children of one module, for any thread. Up to two of them are kept."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._idle: list[WarmChild] = []  # appending and popping are atomic
        if hasattr(os, "register_at_fork"):
            # Two processes cannot talk to one child.
            os.register_at_fork(after_in_child=self._idle.clear)

    def ask(self, request: dict[str, Any], *, limit_s: float) -> ChildOutcome:
        """`WarmChild.ask` of a child that does nothing else."""
        child = self._alive()
        try:
            return child.ask(request, limit_s=limit_s)
        finally:
            if child.is_alive and len(self._idle) < _MOST_IDLE:
                self._idle.append(child)

    def _alive(self) -> WarmChild:
        with contextlib.suppress(IndexError):
            while True:
                if (child := self._idle.pop()).is_alive:
                    return child
        return WarmChild(self._module)


def _popen(without_gpu: bool, stderr: int, *mode: str) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if not _SECRET.search(k)}
    environment |= {"GGML_NO_BACKTRACE": "1"}
    environment.pop("PYTHONFAULTHANDLER", None)
    if without_gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, *mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
    )


def _start_line(module: str) -> bytes:
    return _line({"path": sys.path, "module": module})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # and not a copy of it, made by fork
        process.kill()
        with process:
            pass


def say(**fields: Any) -> None:
    """For the child: write a line for the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def answer(work: Callable[[dict[str, Any]], None], request: dict[str, Any]) -> None:
    """For the child: do the work, which names its stages, and write how it ended."""
    die_quietly()
    try:
        work(request)
        say(done=True)
    except (DflashError, ImportError) as fault:
        say(fault=str(fault))


def die_quietly() -> None:
    """For the child: leave no core file and open no dialog, as its death may be expected."""
    if sys.platform == "win32":
        import ctypes

        ctypes.windll.kernel32.SetErrorMode(0x8003)
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def n_threads() -> int:
    """Few threads: if they must share a core, they wait for each other longer than they work."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def bound_memory(n_bytes: int) -> None:
    """For the child: limit its address space, if the system can enforce that."""
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


def _outcome(return_code: int, out: bytes, err: str) -> ChildOutcome:
    found = _report(out)
    if found.done:
        return found
    fault = found.fault or _telling_line(err)
    death = "" if return_code == 0 else _death(return_code)
    is_short = return_code == -_SIGKILL or bool(_SHORT_OF_MEMORY.search(fault))
    return replace(found, fault=fault, death=death, short=is_short)


def _report(out: bytes) -> ChildOutcome:
    """The outcome by the child's own output."""
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
    return ChildOutcome(stage, "" if done else fault, done=done, said=said)


def _death(return_code: int) -> str:
    if return_code == -_SIGKILL:
        return "the process was killed, probably for lack of memory"
    if return_code < 0:
        with contextlib.suppress(ValueError):
            return f"the process died by {signal.Signals(-return_code).name}"
    return f"the process ended with code {return_code}"


def _telling_line(err: str) -> str:
    """The most telling line that a dead process printed, with paths of its sources shortened."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    for pattern in _TELLING:
        for line in reversed(lines):
            if pattern.search(line):
                return re.sub(r"^\S*[/\\](?=[\w.-]+:\d+:)", "", line)[:300]
    return ""
