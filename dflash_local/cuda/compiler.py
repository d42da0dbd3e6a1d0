"""NVRTC, NVIDIA's compiler as a library: from a kernel's text to the code of one GPU.

It comes with pip (`dflash-local[cuda]`) or with a CUDA toolkit, and needs neither a GPU nor a
driver.
"""

import ctypes
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from functools import cached_property, lru_cache
from pathlib import Path

from dflash_local.errors import BackendError

INSTALL = "pip install 'dflash-local[cuda]'"

_OPTIONS = (
    "--std=c++17",
    "--fmad=false",  # only where the text says so: kernels of all widths must round alike
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
)
_PATTERN = "nvrtc64_*.dll" if sys.platform == "win32" else "libnvrtc.so.*"
_VERSION = re.compile(r"(?:so\.|nvrtc64_)(\d+)")


class Compiler:
    """One NVRTC. Raises BackendError if it does not load."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        except (OSError, AttributeError) as error:
            raise BackendError(f"{path} does not load: {error}") from None
        self.major, self.minor = major.value, minor.value

    def __str__(self) -> str:
        return f"NVRTC {self.major}.{self.minor}"

    @cached_property
    def architectures(self) -> tuple[int, ...]:
        """Those that it compiles for: 90 for compute capability 9.0."""
        n = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(n)))
        found = (ctypes.c_int * n.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found))
        return tuple(found)

    def compile(self, source: str, architecture: int) -> tuple[bytes, str]:
        """Machine code for one architecture, as a driver takes it, and the log. Raises BackendError
        with the compiler's words."""
        program = ctypes.c_void_p()
        library = self._library
        self._check(
            library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"few_rows.cu", 0, None, None
            )
        )
        try:
            options = [f"--gpu-architecture=sm_{architecture}", *_OPTIONS]
            array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            status = library.nvrtcCompileProgram(program, len(options), array)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
            if status:
                raise BackendError(f"{self} cannot compile for sm_{architecture}: {_fault(log)}")
            return self._bytes(program, "CUBIN"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        n = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(n)))
        buffer = ctypes.create_string_buffer(n.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            words = self._library.nvrtcGetErrorString
            words.restype = ctypes.c_char_p
            raise BackendError(f"NVRTC failed: {words(status).decode()}")


def _fault(log: str) -> str:
    """The first error of a log, or its first line."""
    lines = [line for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no reason")


@lru_cache(maxsize=1)
def find_compilers() -> tuple[Compiler, ...]:
    """Every NVRTC here that loads, the newest first."""
    found: dict[tuple[int, int], Compiler] = {}
    for path in _places():
        try:
            compiler = Compiler(path)
        except BackendError:
            continue
        found.setdefault((compiler.major, compiler.minor), compiler)
    return tuple(compiler for _, compiler in sorted(found.items(), reverse=True))


def compiler_for(driver: int, architectures: Sequence[int]) -> Compiler | None:
    """An NVRTC whose code the driver (12040 for CUDA 12.4) loads and that knows these GPUs; None if
    there is none. A driver loads code of its own major version, or an older one."""
    for compiler in find_compilers():
        fits = compiler.major <= driver // 1000
        if fits and set(architectures) <= set(compiler.architectures):
            return compiler
    return None


def _places() -> Iterator[Path]:
    """Files that may be NVRTC: pip's, those of toolkits, and the system linker's."""
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    packages |= {*site.getsitepackages(), site.getusersitepackages()}
    for folder in sorted(packages):
        for part in ("lib", "bin"):
            yield from _newest(Path(folder, "nvidia").glob(f"*/{part}/**/{_PATTERN}"))
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    toolkits = [Path(root) for root in roots if root]
    toolkits += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    for toolkit in toolkits:
        for part in ("lib64", "bin", "targets/*/lib"):
            yield from _newest(toolkit.glob(f"{part}/{_PATTERN}"))
    if known := find_library("nvrtc"):
        yield Path(known)


def _newest(paths: Iterator[Path]) -> list[Path]:
    return sorted((p for p in paths if _VERSION.search(p.name)), reverse=True)
