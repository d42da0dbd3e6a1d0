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
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

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

_FORMAT = 5
_LIMIT_S = 300.0
_SLOWEST_BYTES_PER_S = 50e6
_AFTER_LOAD = ("context", "taps", "decode")
_PREFIXES = re.compile(r"^(\w+: )?(error loading model( vocabulary)?: )+")


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
        found = _outcome(target, draft, wanted, limit_s, say)
        n_snapshots = way_back.by("snapshots")
        if found.done or found.short or not n_snapshots or found.stage not in _AFTER_LOAD:
            break
        way_back = WayBack("snapshots", n_snapshots // 2) if n_snapshots > 1 else CELLS
    if not found.done:
        _raise(found, target, draft, how.get("mmproj"))
    return way_back


def _outcome(
    target: Path,
    draft: Path | None,
    wanted: dict[str, Any],
    limit_s: float,
    say: Callable[[str], None],
) -> child.ChildOutcome:
    """That of before, or else of a trial."""
    key = {
        "format": _FORMAT,
        "files": [file_key(path) for path in (target, draft) if path],
        "build": [file_key(path) for path in libraries()],
        "cpu": _cpu(),
        **wanted,
    }
    if kept := _kept(key):
        return kept
    files = shard_files(target) + ((draft,) if draft else ())
    found = child.run(
        "dflash_local.trial.model_child",
        {"target": str(target), "draft": str(draft) if draft else None, **wanted},
        limit_s=limit_s + sum(path.stat().st_size for path in files) / _SLOWEST_BYTES_PER_S,
        on_wait=lambda: say(f"trying {target.name} in a child process, once ..."),
        without_gpu=wanted["n_gpu_layers"] == 0,
    )
    found = replace(found, fault=_PREFIXES.sub("", found.fault), said=[])
    if not found.short:
        disk_cache.write("probe", key, {"outcome": asdict(found)})
    return found


def _raise(
    found: child.ChildOutcome, target: Path, draft: Path | None, mmproj: list[Any] | None
) -> NoReturn:
    stage, why = found.stage, ", ".join(part for part in (found.death, found.fault) if part)
    if found.short:
        raise BackendError(f"{target}: the trial load in a child process failed ({stage}): {why}")
    if stage == "import":
        raise BackendError(f"llama-cpp-python cannot be used here: {why}; {REINSTALL}")
    if stage == "product":
        raise BackendError(
            "this build of llama-cpp-python fails on this CPU at a quantised matrix product "
            f"({why}): a native build by GCC before 13 does so on CPUs with AMX; "
            f"reinstall it: {REINSTALL}"
        )
    path = draft if stage in ("draft", "assistant") and draft else target
    if stage == "projector" and mmproj:
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
    }.get(stage, stage)
    raise FileError(
        f"{path}: llama.cpp cannot {doing}: {why}; the file is malformed or of a kind that this "
        "llama.cpp does not run: download or convert it again"
    )


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


def _kept(key: dict[str, Any]) -> child.ChildOutcome | None:
    try:
        found = child.ChildOutcome(**disk_cache.read("probe", key)["outcome"])
    except (TypeError, LookupError):  # not tried yet, or damaged
        return None
    texts = (found.stage, found.fault, found.death)
    return found if all(isinstance(text, str) for text in texts) else None
