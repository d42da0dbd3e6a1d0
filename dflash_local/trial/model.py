"""Tries a model once in a child process, as llama.cpp may abort on it, and keeps the verdict.

A verdict, good or bad, is valid as long as the files, the build of llama.cpp, the CPU, the tapped
layers, and the way back of recurrent states stay the same.
"""

import contextlib
import hashlib
import importlib.util
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_local import disk_cache
from dflash_local.errors import BackendError, FileError
from dflash_local.fit.architectures import CELLS, WayBack
from dflash_local.gguf.file import file_key, shard_files
from dflash_local.printable import to_stderr
from dflash_local.trial import child

REINSTALL = (
    'CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install --force-reinstall --no-cache-dir '
    "llama-cpp-python==0.3.36"
)

AS_USUAL: Mapping[str, Any] = MappingProxyType({})

_FORMAT = 4
_LIMIT_S = 300.0
_SLOWEST_BYTES_PER_S = 50e6
_AFTER_LOAD = ("context", "taps", "decode")
_PREFIXES = re.compile(r"^(\w+: )?(error loading model( vocabulary)?: )+")


@dataclass(frozen=True)
class LoadVerdict:
    """The result of a trial. `stage` is the stage that failed; empty if none did."""

    stage: str = ""
    fault: str = ""
    """The report at that stage, or the last output before the process died."""
    death: str = ""
    """How the process died; empty if it ended by itself."""
    lasting: bool = True
    """False if another try may succeed, after a lack of memory or time."""


def ensure_loadable(
    target: Path,
    draft: Path | None,
    *,
    layers: tuple[int, ...],
    n_gpu_layers: int = 0,
    way_back: WayBack = CELLS,
    how: Mapping[str, Any] = AS_USUAL,
    pooling: int | None = None,
    limit_s: float = _LIMIT_S,
    say: Callable[[str], None] = to_stderr,
) -> WayBack:
    """Return if llama.cpp can load `target`, decode with taps on `layers`, and take rows back.

    Returns the way back that it can go: the snapshots of a large model may be more nodes than its
    graph can have, which ends the process. Then half as many are tried.

    If there is a `draft`, llama.cpp must be able to read its header. With `pooling`, one of
    `LLAMA_POOLING_TYPE_*`, the model is to make vectors of texts, and is tried at that. `how` is
    `Setup.how_loaded`. All this is tried in a child process, unless a verdict is kept from before.
    The child gets `limit_s` seconds, and more for large files; `say` gets a line where it takes
    long. Raises FileError if a file is at fault, and BackendError if the build of llama.cpp is, or
    if memory or time did not suffice.
    """
    while True:
        wanted: dict[str, Any] = {
            "layers": list(layers),
            "n_gpu_layers": n_gpu_layers,
            "way_back": asdict(way_back),
            **({} if pooling is None else {"pooling": pooling}),
        }
        wanted |= how
        verdict = _verdict(target, draft, wanted, limit_s, say)
        n_snapshots = way_back.by("snapshots")
        if not (n_snapshots and verdict.lasting and verdict.stage in _AFTER_LOAD):
            break
        way_back = WayBack("snapshots", n_snapshots // 2) if n_snapshots > 1 else CELLS
    _raise(verdict, target, draft, how.get("mmproj"))
    return way_back


def _verdict(
    target: Path,
    draft: Path | None,
    wanted: dict[str, Any],
    limit_s: float,
    say: Callable[[str], None],
) -> LoadVerdict:
    """That of before, or else of a trial."""
    key = {
        "format": _FORMAT,
        "files": [file_key(path) for path in (target, draft) if path],
        "build": [file_key(path) for path in libraries()],
        "cpu": _cpu(),
        **wanted,
    }
    verdict = _kept(key)
    if verdict is None:
        request = {"target": str(target), "draft": str(draft) if draft else None, **wanted}
        files = shard_files(target) + ((draft,) if draft else ())
        verdict = _tried(target, request, limit_s, files, say)
        if verdict.lasting:
            disk_cache.write("probe", key, {"verdict": asdict(verdict)})
    return verdict


def _raise(
    verdict: LoadVerdict, target: Path, draft: Path | None, mmproj: list[Any] | None
) -> None:
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
    path = draft if verdict.stage in ("draft", "assistant") and draft else target
    if verdict.stage == "projector" and mmproj:
        path = Path(mmproj[0])
    doing = {
        "draft": "read the header",
        "vocabulary": "load the vocabulary",
        "load": "load the model",
        "projector": "open the projector of its images",
        "context": "make a context",
        "taps": "tap its layers",
        "decode": "decode a few tokens",
        "heads": "draft with its heads",
        "assistant": f"draft with it for {target.name}",
        "embed": "make a vector of a few tokens",
    }.get(verdict.stage, verdict.stage)
    raise FileError(
        f"{path}: llama.cpp cannot {doing}: {why}; the file is malformed or of a kind that this "
        "llama.cpp does not run: download or convert it again"
    )


def _tried(
    target: Path,
    request: dict[str, Any],
    limit_s: float,
    files: tuple[Path, ...],
    say: Callable[[str], None],
) -> LoadVerdict:
    limit_s += sum(path.stat().st_size for path in files) / _SLOWEST_BYTES_PER_S

    def on_wait() -> None:
        say(f"trying {target.name} in a child process, once ...")

    outcome = child.run(
        "dflash_local.trial.model_child",
        request,
        limit_s=limit_s,
        on_wait=on_wait,
        without_gpu=request["n_gpu_layers"] == 0,
    )
    if outcome.done:
        return LoadVerdict()
    fault = _PREFIXES.sub("", outcome.fault)
    return LoadVerdict(outcome.stage, fault, outcome.death, lasting=not outcome.short)


def libraries() -> tuple[Path, ...]:
    """Our compiled part and the libraries of the installed llama_cpp, without importing it."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise BackendError(f"llama-cpp-python is not installed; {REINSTALL}")
    folder = Path(spec.origin).parent / "lib"
    libraries = sorted(
        path
        for path in folder.glob("*")
        if re.match(r"(lib)?(llama|ggml|mtmd)[\w-]*\.(so|dylib|dll)$", path.name)
    )
    ours = importlib.util.find_spec("dflash_local._native")
    if ours is not None and ours.origin is not None:
        libraries.append(Path(ours.origin))
    return tuple(libraries)


def _cpu() -> str:
    """The CPU's name and features: machines that share a home folder may differ in them."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
        if told:
            return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    return f"{platform.machine()} {platform.processor()}"


def _kept(key: dict[str, Any]) -> LoadVerdict | None:
    try:
        verdict = LoadVerdict(**disk_cache.read("probe", key)["verdict"])
    except (TypeError, LookupError):  # not tried yet, or damaged
        return None
    texts = (verdict.stage, verdict.fault, verdict.death)
    return verdict if all(isinstance(text, str) for text in texts) else None
