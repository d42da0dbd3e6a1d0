"""Products and attention of few rows by our own kernels: whether a model gets them here, and why
not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from dflash_local.cuda import kernels, trial
from dflash_local.cuda.compiler import INSTALL, Compiler, compiler_for, find_compilers
from dflash_local.cuda.kernels import Experts, Heads
from dflash_local.cuda.trial import EVERY_PASS, Finding
from dflash_local.errors import BackendError
from dflash_local.llama import native, runtime

if TYPE_CHECKING:
    from dflash_local.gguf.file import GgufFile

ENVIRONMENT = "DFLASH_LOCAL_FEW_ROWS"
"""0: llama.cpp multiplies everything, for comparisons."""
GAIN = "passes of 4 to 32 rows took 0.5 to 0.7 of the time on an H100"

_COMPILING = "compiling kernels for this GPU, once: some seconds"
_OWN = "products and attention of up to 64 rows run by kernels of our own"
_ASIDE = "passes of few rows are left to llama.cpp's kernels:"


class FewRows:
    """State shared by the backends of one model. Not thread safe: the thread that owns the model
    uses it."""

    def __init__(self, compiler: Compiler | None = None, *, on_cpu: bool = False) -> None:
        """`on_cpu`: the CPU stands in for the GPU, in tests of the code around the kernels."""
        self.native = native.FewRows()
        self.compiler = compiler
        self.findings: list[Finding] = []
        """The trial's result for each shape of matrix on each kind of GPU."""
        self._left: dict[kernels.Kind, range] = {}
        """The row counts of passes that are left to llama.cpp, on all GPUs."""
        self._on_cpu = on_cpu

    @contextmanager
    def scope(self) -> Iterator[None]:
        """The backends that this thread opens in it run their graphs by these kernels."""
        scope = native.FewRowsScope()
        scope.enter(self.native, self._on_cpu)
        try:
            yield
        finally:
            scope.leave()

    def take(self, findings: Sequence[Finding], *, exact: bool = False) -> None:
        """Leave to llama.cpp every type that ours do not do right in all shapes, and the shapes it
        does faster; the latter not if answers are to be `exact`: its kernels round differently for
        one row than for more."""
        self.findings += findings
        wrong = {finding.shape.type_name for finding in findings if finding.fault}
        for finding in findings:
            shape = finding.shape
            left = range(0) if exact else finding.left
            if shape.type_name in wrong:
                left = EVERY_PASS
            if not left:
                continue
            known = self._left.get(shape, left)  # of another GPU
            left = range(min(known[0], left[0]), max(known[-1], left[-1]) + 1)
            self._left[shape] = left
            if isinstance(shape, Heads):
                self.native.leave_attention(shape.keys, shape.values, shape.head_dim)
            elif isinstance(shape, Experts):
                self.native.leave_experts(shape.type, shape.k, shape.rows, left[0], left[-1])
            else:
                self.native.leave(shape.type, shape.k, shape.rows, left[0], left[-1])

    @property
    def faults(self) -> list[str]:
        """A line for each type of matrices with which something is wrong."""
        of_types = {f.shape.type_name: f for f in self.findings if f.fault}
        return [
            f"the kernel for {name} ({finding.shape}) is put aside on this GPU: {finding.fault}"
            for name, finding in of_types.items()
        ]

    @property
    def key(self) -> list[Any]:
        """A key for results and times: the kernels, and the passes that are left to llama.cpp."""
        left = (
            str(shape)
            if rows == EVERY_PASS
            else f"{shape} in passes of {rows[0]} to {rows[-1]} rows"
            for shape, rows in self._left.items()
        )
        return [kernels.source_hash(), *sorted(left)]

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the work so far; see `few_rows_counts` in native/few_rows.h."""
        return self.native.counts

    @property
    def line(self) -> str:
        """For the user, once the backends are open."""
        reason = self.native.reason
        return f"{_ASIDE} {reason}" if reason else _OWN


def is_wanted() -> bool:
    """Whether the environment lets our kernels run."""
    return os.environ.get(ENVIRONMENT) != "0"


def advice() -> str | None:
    """Advice for a GPU that could have our kernels and has none; None if there is nothing to do."""
    runtime.init()
    gpus, _ = native.few_rows_gpus()
    if not gpus or not is_wanted() or _compiler(gpus) is not None:
        return None
    return _no_compiler(gpus)


def open_few_rows(
    files: Sequence[GgufFile],
    say: Callable[[str], None],
    *,
    kv_types: tuple[str, str] = ("f16", "f16"),
    exact: bool = False,
    again: bool = False,
) -> FewRows | None:
    """Kernels for the matrices of these files on the GPUs of this process, and for the attention of
    the first, the target, over a cache of `kv_types`, where they are right and faster than
    llama.cpp's; if answers are to be `exact`, also where they are not faster. `again` measures that
    anew. None, and one line, where there can be none; no line where no NVIDIA GPU is used."""
    runtime.init()
    gpus, _ = native.few_rows_gpus()
    if not gpus or not is_wanted():
        return None
    compiler = _compiler(gpus)
    if compiler is None:
        say(f"{_ASIDE} {_no_compiler(gpus)}")
        return None
    shapes = [named for file in files for named in kernels.shapes_of(file).items()]
    opened = FewRows(compiler)
    begin = cache(lambda: say(_COMPILING))
    heads, experts = kernels.heads_of(files[0], *kv_types), kernels.experts_of(files[0])
    needed: list[kernels.Compiled] = [*kernels.pairs_of(shapes), *sorted(heads), *sorted(experts)]
    wanted: set[kernels.Kind] = {shape for _, shape in shapes} | heads | experts
    try:
        for device, architecture, description in gpus:
            code = kernels.cubins(needed, architecture, compiler, begin)
            opened.native.add(device, code)
            of = {
                "gpu": description,
                "driver": native.few_rows_driver(),
                "compiler": str(compiler),
                "source": kernels.source_hash(),
                "build": runtime.llama_build(),
            }
            opened.take(trial.findings(wanted, device, code, of, say, again=again), exact=exact)
    except BackendError as error:
        say(f"{_ASIDE} {error}")
        return None
    for line in opened.faults:
        say(line)
    return opened


def _compiler(gpus: Sequence[tuple[str, int, str]]) -> Compiler | None:
    return compiler_for(native.few_rows_driver(), sorted({gpu[1] for gpu in gpus}))


def _no_compiler(gpus: Sequence[tuple[str, int, str]]) -> str:
    found = find_compilers()
    if not found:
        return f"NVIDIA's compiler NVRTC is missing; with it {GAIN}: {INSTALL}"
    driver = native.few_rows_driver()
    return (
        f"{found[0]} does not fit {gpus[0][2]} with a driver for CUDA {driver // 1000}: install "
        f"nvidia-cuda-nvrtc-cu{driver // 1000}"
    )
