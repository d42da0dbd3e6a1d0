"""What llama.cpp may abort on is tried once in a child process, and the verdict kept.

A verdict, good or bad, holds as long as the files, the build of llama.cpp, the CPU and the tapped
layers stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cache_dir import cache_dir
from .drafter_spec import DrafterSpec
from .errors import BackendError, FileError
from .gguf_file import shard_files

REINSTALL = (
    'CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install --force-reinstall --no-cache-dir '
    "llama-cpp-python==0.3.36"
)

_FORMAT = 3
_QUIET_S = 2.0
_LIMIT_S = 300.0
_SLOWEST_BYTES_PER_S = 50e6
# the child gets our own search path: it must find this package whichever way we were found
_LAUNCH = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from dflash_local.probe_child import main; main(request)"
)
_SIGKILL = 9
_SHORT_OF_MEMORY = re.compile(r"(failed|unable) to allocate|out of memory|bad_alloc", re.IGNORECASE)
_PREFIXES = re.compile(r"^(\w+: )?(error loading model( vocabulary)?: )+")
_TELLING = (
    re.compile(r"GGML_ASSERT|GGML_ABORT"),
    re.compile(r"what\(\):"),
    re.compile(r"error|fail", re.IGNORECASE),
    re.compile(r"\S"),
)


@dataclass(frozen=True)
class Verdict:
    """How far the child came. `stage` is the one that failed, empty if none did."""

    stage: str = ""
    fault: str = ""
    """What was reported at that stage, or last printed before the process died."""
    death: str = ""
    """How the process died; empty if it ended by itself."""
    lasting: bool = True
    """False for what another moment may change: memory, time."""


def ensure_loadable(
    target: Path,
    draft: Path | None,
    *,
    layers: tuple[int, ...],
    n_gpu_layers: int = 0,
    spec: DrafterSpec | None = None,
    limit_s: float = _LIMIT_S,
) -> None:
    """Return if llama.cpp can load `target` and decode with taps on `layers`.

    A `draft` that, by its `spec`, llama.cpp itself runs must draft a block, too.

    Tried in a child process unless a kept verdict says so already. `limit_s` seconds, and more for
    large files, are given to it. Raises FileError when a file is at fault, BackendError when the
    build of llama.cpp is, or when memory or time did not suffice.
    """
    files = shard_files(target) + ((draft,) if draft else ())
    build = _build()
    trial = _trial(spec) if draft and spec and spec.runs_on == "llama.cpp" else None
    key = {
        "format": _FORMAT,
        "files": [_identity(path) for path in files],
        "build": [_identity(path) for path in build],
        "cpu": _cpu(),
        "layers": list(layers),
        "n_gpu_layers": n_gpu_layers,
        "trial": trial,
    }
    verdict = _kept(key)
    if verdict is None:
        request = {
            "target": str(target),
            "draft": str(draft) if draft else None,
            "layers": list(layers),
            "n_gpu_layers": n_gpu_layers,
            "trial": trial,
        }
        verdict = _tried(target, request, limit_s, files)
        if verdict.lasting:
            _keep(key, verdict)
    _raise(verdict, target, draft)


def _raise(verdict: Verdict, target: Path, draft: Path | None) -> None:
    if not verdict.stage:
        return
    why = ", ".join(part for part in (verdict.death, verdict.fault) if part)
    if not verdict.lasting:
        raise BackendError(
            f"{target}: the trial load in a child process failed ({verdict.stage}): {why}"
        )
    if verdict.stage == "import":
        raise BackendError(f"llama-cpp-python cannot be used here: {why}; {REINSTALL}")
    if verdict.stage == "product":
        raise BackendError(
            "this build of llama-cpp-python fails on this CPU at a quantised matrix product "
            f"({why}): a native build by GCC before 13 does so on CPUs with AMX; "
            f"reinstall it: {REINSTALL}"
        )
    path = draft if verdict.stage.startswith("draft") and draft else target
    doing = {
        "draft": "read the header",
        "draft load": "load the drafter",
        "draft decode": "draft a block",
        "vocabulary": "load the vocabulary",
        "load": "load the model",
        "context": "make a context",
        "taps": "tap its layers",
        "decode": "decode two tokens",
    }.get(verdict.stage, verdict.stage)
    raise FileError(
        f"{path}: llama.cpp cannot {doing}: {why}; the file is malformed or of a kind that this "
        "llama.cpp does not run: download or convert it again"
    )


def _trial(spec: DrafterSpec) -> dict[str, Any]:
    """What the child needs to draft one block."""
    return {
        "n_features": spec.n_taps * spec.n_embd,
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "causal": spec.causal,
        "lattice": spec.selector is not None,
    }


def _tried(
    target: Path, request: dict[str, Any], limit_s: float, files: tuple[Path, ...]
) -> Verdict:
    n_gpu_layers = request["n_gpu_layers"]
    request = {"path": sys.path, **request}
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    environment.pop("PYTHONFAULTHANDLER", None)
    if n_gpu_layers == 0:
        # no trial on the CPU should take memory of a GPU
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    limit_s += sum(path.stat().st_size for path in files) / _SLOWEST_BYTES_PER_S
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as child:
        try:
            out, err = _output(child, limit_s, target)
        except subprocess.TimeoutExpired:
            child.kill()
            out, _ = child.communicate()
            return Verdict(_report(out)[0], f"stopped after {limit_s:.0f} s", lasting=False)
        except BaseException:
            child.kill()
            raise
    return _verdict(child.returncode, out, err.decode("utf-8", "replace"))


def _output(child: subprocess.Popen[bytes], limit_s: float, target: Path) -> tuple[bytes, bytes]:
    quiet_s = min(_QUIET_S, limit_s)
    try:
        return child.communicate(timeout=quiet_s)
    except subprocess.TimeoutExpired:
        if limit_s <= quiet_s:
            raise
        if sys.stderr is not None:
            print(f"trying {target.name} in a child process, once ...", file=sys.stderr, flush=True)
        return child.communicate(timeout=limit_s - quiet_s)


def _verdict(return_code: int, out: bytes, err: str) -> Verdict:
    stage, fault, done = _report(out)
    if done:
        return Verdict()
    fault = fault or _telling_line(err)
    killed = return_code == -_SIGKILL
    return Verdict(
        stage,
        _PREFIXES.sub("", fault),
        "" if return_code == 0 else _death(return_code),
        lasting=not (killed or _SHORT_OF_MEMORY.search(fault)),
    )


def _report(out: bytes) -> tuple[str, str, bool]:
    """Stage begun last, fault, and whether all stages passed, of what the child wrote."""
    stage, fault, done = "import", "", False
    for line in out.decode("utf-8", "replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):
            stage = str(said.get("stage", stage))
            fault = str(said.get("fault", fault))
            done = done or said.get("done") is True
    return stage, fault, done


def _death(return_code: int) -> str:
    if return_code == -_SIGKILL:
        return "the process was killed, probably for want of memory"
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


def _build() -> tuple[Path, ...]:
    """Our compiled part, and the libraries of the installed llama_cpp, not imported for this."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise BackendError(f"llama-cpp-python is not installed; {REINSTALL}")
    folder = Path(spec.origin).parent / "lib"
    libraries = sorted(
        path
        for path in folder.glob("*")
        if re.match(r"(lib)?(llama|ggml)[\w-]*\.(so|dylib|dll)$", path.name)
    )
    ours = importlib.util.find_spec("dflash_local._native")
    if ours is not None and ours.origin is not None:
        libraries.append(Path(ours.origin))
    return tuple(libraries)


def _identity(path: Path) -> list[Any]:
    try:
        status = path.stat()
        return [str(path.resolve()), status.st_size, status.st_mtime_ns]
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None


def _cpu() -> str:
    """What may change the verdict when a home folder is shared: the CPU's name and features."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
        if told:
            return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    return f"{platform.machine()} {platform.processor()}"


def _kept_path(key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / "probe" / f"{name}.json"


def _kept(key: dict[str, Any]) -> Verdict | None:
    try:
        kept = json.loads(_kept_path(key).read_text(encoding="utf-8"))
        verdict = Verdict(**kept["verdict"])
        texts = (verdict.stage, verdict.fault, verdict.death)
        if kept["key"] != key or not all(isinstance(text, str) for text in texts):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict


def _keep(key: dict[str, Any], verdict: Verdict) -> None:
    # a verdict that cannot be kept is found again next time
    with contextlib.suppress(OSError):
        path = _kept_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": key, "verdict": asdict(verdict)}, file)
            os.replace(partial, path)
        except OSError:
            os.unlink(partial)
            raise
