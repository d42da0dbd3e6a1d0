"""The llama.cpp of this process: its version, its devices, and its log.

This module imports `llama_cpp`, before the native extension is loaded. The extension then uses the
libraries that are loaded already. An ImportError says what to install.
"""

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from dflash_local.errors import BackendError
from dflash_local.llama.host import host_memory
from dflash_local.printable import printable

PINNED = "0.3.36"
INSTALL = f"pip install --force-reinstall --no-cache-dir llama-cpp-python=={PINNED}"
PORTABLE = 'CMAKE_ARGS="-DGGML_NATIVE=OFF"'

DeviceType = Literal["cpu", "gpu", "igpu", "accel", "meta"]

_DEVICE_TYPES: tuple[DeviceType, ...] = ("cpu", "gpu", "igpu", "accel", "meta")
_DEBUG, _ERROR, _CONTINUED = 1, 4, 5  # GGML_LOG_LEVEL_* of ggml.h


def _advice(command: str = f"pip install llama-cpp-python=={PINNED}") -> str:
    return f"install it with: {PORTABLE} {command} (add -DGGML_CUDA=on for an NVIDIA GPU)"


_SPINS = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000"}
"""Of GNU's OpenMP: look so often whether the others are there, then sleep. 1,000 looks take some
fifty microseconds. With fewer a small model is slower on eight quiet cores, with more what cannot
use fewer threads is on a busy machine: docs/install.md has the numbers. "ACTIVE" makes the count
hold also where OpenMP counts more threads than cores."""


@contextmanager
def _sleeping_threads() -> Iterator[None]:
    """OpenMP, if it is loaded here, lets threads sleep that wait long for another one.

    By default they spin for milliseconds. If other processes want the cores, too, the thread
    that is waited for often has none, and a pass takes up to a hundred times as long. GNU's OpenMP
    reads the variables when it is loaded. The user's settings stay; no other library gets to see
    those made here.
    """
    if not os.environ.keys().isdisjoint(_SPINS):
        yield
        return
    os.environ.update(_SPINS)
    try:
        yield
    finally:
        for name in _SPINS:
            del os.environ[name]


try:
    with _sleeping_threads():
        import llama_cpp
except Exception as error:  # a library that does not load raises OSError or RuntimeError
    if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp":
        raise ImportError(
            f"dflash_local needs llama-cpp-python {PINNED}, which is not installed; {_advice()}"
        ) from None
    raise ImportError(
        f"dflash_local needs llama-cpp-python {PINNED}, but the one installed does not load "
        f"({error}); {_advice(INSTALL)}"
    ) from None

if getattr(llama_cpp, "__version__", None) != PINNED:
    raise ImportError(
        f"dflash_local needs llama-cpp-python {PINNED}, found "
        f"{getattr(llama_cpp, '__version__', 'one without a version')} in "
        f"{Path(llama_cpp.__file__ or '?').parent}; {_advice(INSTALL)}"
    )

import llama_cpp.llama_cpp as _api  # noqa: E402

api = _api
"""The functions of the llama.cpp that was checked above. Take them from here."""
_library: ctypes.CDLL = _api._lib


@dataclass(frozen=True)
class Device:
    """One device of ggml. Memory is in bytes; `free` of the CPU is what this process may use.

    `id` tells one physical device seen by two backends (a PCI bus id; empty if unknown).
    `shares_host` marks a GPU whose memory is the host's, `is_remote` one of another machine.
    """

    name: str
    description: str
    type: DeviceType
    free: int
    total: int
    id: str = ""
    shares_host: bool = False
    is_remote: bool = False


class _Props(ctypes.Structure):
    """`ggml_backend_dev_props` of ggml-backend.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", ctypes.c_bool * 5),
    )


class _Override(ctypes.Structure):
    """`llama_model_tensor_buft_override` of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def check_same_library(native_address: int) -> None:
    """Refuse an extension that is linked to a different copy of libllama than `llama_cpp`.

    `native_address` is the address of `llama_decode` as the extension sees it. Raises ImportError.
    """
    address = ctypes.cast(_library.llama_decode, ctypes.c_void_p).value
    if address != native_address:
        raise ImportError(
            "dflash_local._native uses another libllama than llama_cpp, which loaded "
            f"{_library._name}; reinstall both: {PORTABLE} {INSTALL} && "
            "pip install --force-reinstall --no-deps dflash-local"
        )


def libmtmd() -> ModuleType:
    """llama-cpp-python's module of the part of llama.cpp that reads images. Raises BackendError
    where it was built without."""
    try:
        from llama_cpp import mtmd_cpp
    except (ImportError, OSError, RuntimeError):
        raise BackendError(
            "this llama-cpp-python was built without libmtmd, which reads images: set it up again "
            "with `python3 bootstrap.py --gpu cuda`, or vulkan, metal, none; see docs/install.md"
        ) from None
    take_log_of(mtmd_cpp.mtmd_helper_log_set)
    return mtmd_cpp


def named_template(name: Literal["chatml", "llama3"]) -> str:
    """A common chat template as Jinja text: llama.cpp has the others as code."""
    from llama_cpp import llama_chat_format as known

    if name == "chatml":
        return known.CHATML_CHAT_TEMPLATE
    return known.LLAMA3_INSTRUCT_CHAT_TEMPLATE


def llama_version() -> str:
    """The version of llama.cpp, as it says it itself."""
    return _text(api.llama_version())


def llama_build() -> str:
    """The build in one line: versions of llama-cpp-python, llama.cpp and ggml."""
    ggml = _text(function("ggml_version", ctypes.c_char_p)())
    commit = _text(function("ggml_commit", ctypes.c_char_p)()).replace("unknown", "")
    return f"llama-cpp-python {PINNED}, llama.cpp {llama_version()}, ggml {ggml} {commit}".rstrip()


def machine() -> dict[str, Any]:
    """All that decides how this machine computes a model: build, CPU features and devices."""
    return {
        "build": llama_build(),
        "system": system_info(),
        "devices": [device.description for device in devices()],
    }


def system_info() -> str:
    """CPU features and backend options that llama.cpp was built with, as it prints them."""
    init()
    return _text(api.llama_print_system_info()).strip()


def backends() -> list[str]:
    """A line per device for `--version` and reports: name, description and memory."""
    gib = 1 << 30
    return [
        f"{d.name}: {d.description} ({d.free / gib:.1f} of {d.total / gib:.1f} GiB free)"
        if d.total
        else f"{d.name}: {d.description}"
        for d in devices()
    ]


def devices() -> list[Device]:
    """Every device that ggml found, in its order, with the memory free at this moment."""
    init()
    count = function("ggml_backend_dev_count", ctypes.c_size_t)
    get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    read = function("ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.POINTER(_Props))
    found = []
    for index in range(count()):
        props = _Props()
        read(get(index), ctypes.byref(props))
        kind = _DEVICE_TYPES[props.type]
        free, total = props.memory_free, props.memory_total
        if kind == "cpu":
            free, total = host_memory(fallback=(free, total))
        name = _text(props.name)
        found.append(
            Device(
                name=name,
                description=_text(props.description),
                type=kind,
                free=free,
                total=total,
                id=_text(props.device_id),
                shares_host=kind == "igpu" or name.startswith(("MTL", "Metal")),
            )
        )
    return found


def cpu() -> str:
    """The name of the CPU as a device."""
    return next(device.name for device in devices() if device.type == "cpu")


def device_pointer(name: str) -> int:
    """ggml's handle of a device of `devices()`."""
    find = function("ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)
    pointer: int = find(name.encode())
    return pointer


def use_devices(params: Any, handles: Iterable[int]) -> None:
    """Let llama.cpp use these devices, in this order. `params` are `llama_model_params`, and keep
    what llama.cpp reads."""
    listed = [*handles, None]
    params.kept_devices = (ctypes.c_void_p * len(listed))(*listed)
    params.devices = ctypes.addressof(params.kept_devices)


def override_keys(params: Any, keys: Mapping[str, int | float | bool | str]) -> None:
    """Let llama.cpp read other values for keys of a file. `params` are `llama_model_params`."""
    listed = (api.llama_model_kv_override * (len(keys) + 1))()
    for each, (key, value) in zip(listed, keys.items(), strict=False):
        each.tag = (int, float, bool, str).index(type(value))
        name = ("val_i64", "val_f64", "val_bool", "val_str")[each.tag]
        setattr(each.value, name, value.encode() if isinstance(value, str) else value)
        each.key = key.encode()
    params.kv_overrides = params.kept_keys = listed


def override_buffers(params: Any, overrides: Sequence[tuple[str, int]]) -> None:
    """Let llama.cpp put the tensors whose names match a pattern on a device, given by its handle.
    The first pattern counts. `params` are `llama_model_params`, and keep what llama.cpp reads."""
    pointer = ctypes.c_void_p
    buffer_type = function("ggml_backend_dev_buffer_type", pointer, pointer)
    listed = [_Override(pattern.encode(), buffer_type(device)) for pattern, device in overrides]
    params.kept_overrides = (_Override * (len(listed) + 1))(*listed)
    params.tensor_buft_overrides = ctypes.addressof(params.kept_overrides)


_init_lock = threading.Lock()
_initialised = False


def init() -> None:
    """Start llama.cpp: take over its log and register its backends. Safe to call again."""
    global _initialised
    with _init_lock:
        if _initialised:
            return
        take_log_of(api.llama_log_set)
        atexit.register(_release_log)
        # For builds with loadable backends. llama.cpp itself would look for them beside the
        # interpreter and in the working folder, where anyone could put one.
        registered = function("ggml_backend_reg_count", ctypes.c_size_t)
        if not registered():
            folder = os.fsencode(Path(_library._name).parent)
            function("ggml_backend_load_all_from_path", None, ctypes.c_char_p)(folder)
        if not registered():
            raise ImportError(
                f"llama.cpp in {Path(_library._name).parent} has no backend, not even for the CPU; "
                f"{_advice(INSTALL)}"
            )
        api.llama_backend_init()
        _initialised = True


class _Log:
    """The first line that llama.cpp logged as an error since `clear`. Any thread may write.

    `echo` is the lowest level that also goes to stderr.
    """

    def __init__(self, echo: int | None) -> None:
        self.echo = echo
        self.first_error = ""
        self._open = ""
        self._level = 0
        # Re-entrant: a garbage collection inside it may free a model, which logs.
        self._lock = threading.RLock()

    def write(self, level: int, text: bytes | None, _data: int | None) -> None:
        if level == _CONTINUED:
            level = self._level
        self._level = level
        if level == _DEBUG and self.echo != _DEBUG:  # hundreds of lines for each graph
            return
        piece = _text(text)
        with self._lock:
            *complete, self._open = (self._open + piece).split("\n")
            if level == _ERROR and not self.first_error:
                self.first_error = next(filter(None, map(str.strip, complete)), "")
        if self.echo is not None and level >= self.echo and sys.stderr is not None:
            sys.stderr.write(printable(piece))
            sys.stderr.flush()

    def clear(self) -> None:
        with self._lock:
            self.first_error = self._open = ""


# DFLASH_LOCAL_LOG: 1 shows llama.cpp's messages on stderr, "debug" its debug lines, too.
_ECHO = {"": None, "0": None, "debug": _DEBUG}
_log = _Log(echo=_ECHO.get(os.environ.get("DFLASH_LOCAL_LOG", "").lower(), _DEBUG + 1))
_callback = api.llama_log_callback(_log.write)
_set_logs: list[Callable[[Any, Any], Any]] = []


def first_error_line() -> str:
    """The first line that llama.cpp logged as an error since `clear_log`; empty if none.

    It names the cause of a failed call. Later lines only pass it on.
    """
    return _log.first_error


def reason() -> str:
    """`first_error_line`, or words in its place, for an error message."""
    return first_error_line() or "it logs no reason"


def clear_log() -> None:
    """Forget the log so far, so that later error lines are those of the next call."""
    _log.clear()


def take_log_of(set_log: Callable[[Any, Any], Any]) -> None:
    """Take over the log of llama.cpp, or of a part of it, whose callback is set by `set_log`."""
    set_log(_callback, ctypes.c_void_p(0))
    if set_log not in _set_logs:
        _set_logs.append(set_log)


def _release_log() -> None:
    # Models that are freed while Python shuts down still log, when Python can no longer be called.
    # With a null callback llama.cpp would print those lines. So the callback becomes a function of
    # libllama that takes no arguments and has no effect.
    silent = ctypes.cast(_library.llama_max_devices, ctypes.c_void_p).value
    last = api.llama_log_callback(silent if silent and _log.echo is None else 0)
    for set_log in _set_logs:
        set_log(last, ctypes.c_void_p(0))


def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A C function of libllama or of the ggml libraries that it is linked to.

    Looked up through libllama's own handle: `llama_cpp._ggml` opens libggml by another file name,
    which on Linux is a second copy with an empty device registry.
    """
    prototype = ctypes.CFUNCTYPE(result, *arguments)
    libraries = [_library]
    if sys.platform == "win32":  # a handle finds only its own functions; equal names are one copy
        folder = Path(_library._name).parent
        libraries += [
            ctypes.CDLL(str(path))
            for base in ("ggml", "ggml-base")
            for path in (folder / f"{base}.dll", folder / f"lib{base}.dll")
            if path.exists()
        ]
    for library in libraries:
        try:
            return prototype((name, library))
        except AttributeError:
            continue
    raise ImportError(f"{_library._name} does not offer {name}; {_advice(INSTALL)}")


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")
