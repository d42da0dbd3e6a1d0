"""Tries kernels in a child process before a model uses them: whether they are right here, and
whether they are faster than llama.cpp's. Both is kept.

A kernel that is wrong, dies or hangs is put aside for good on this GPU with this driver, compiler
and text. A column should have the same bits whatever comes beside it, so a matrix is multiplied by
ours for all usual numbers of columns or for none. The decision is by the sum of the times for
`DECISIVE` columns, each with equal weight: a plain step, and verify passes of the usual widths.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any

from dflash_local import disk_cache
from dflash_local.cuda.kernels import Experts, Heads, Kind, Shape
from dflash_local.errors import DflashError
from dflash_local.llama import native, runtime
from dflash_local.trial import child

DECISIVE = (1, 4, 8, 16)
"""Columns."""

EVERY_PASS = range(1, 65)
"""The rows of passes for which there are kernels of ours."""

_PLAIN = 2
"""Rows up to which llama.cpp may multiply by experts while ours has more. In whole passes of a
30B-A3B shape ours was the faster from 4 rows on, though a trial, whose rows share no experts, says
from 16; one of 256 experts lost 6 % at 8 rows and gained from 16."""
_SAVED_US = 2.0
"""The further savings of our products in a pass, beside their trials: inputs are converted once,
and q, k and v, gate and up, and the work on their results, are one launch each. In SmolLM2-135M a
product of up to 8 columns took 2.5 microseconds longer by itself, and passes of as many rows 0.79
to 0.97 of the time."""
_ATTENTION = 1.15
"""Ours may take so much of llama.cpp's time in a trial of attention: in a pass it also makes the
input of the next product, which saves a launch, and a layer is the faster one with it."""
_MOST_ERROR = 0.02
"""Of a column's length, from the same products in float64. Ours keep 11 bits of an input, and are
off by 0.0002; llama.cpp's, which keep 8, by 0.005 to 0.03."""
_MOST_BYTES = 128 << 20
"""Of a matrix: more rows of the same take as much longer with any kernel."""
_ROWS = 256
"""A matrix that is cut keeps a multiple of this: llama.cpp's kernels read two rows at a time, also
behind the last one."""
_KINDS: dict[str, type[Kind]] = {kind.__name__: kind for kind in (Shape, Heads, Experts)}
_START_S, _SHAPE_S = 60.0, 20.0
"""Limits: a child begins in some 2 s, and a matrix takes a tenth of one."""


@dataclass(frozen=True)
class Finding:
    """Of one kind of matrices or attention. Microseconds by columns; `fault` is why
    ours may not be used; empty: they may. `passes`: the fault lies in the moment, such as a lack of
    memory, so it is tried again at the next load."""

    shape: Kind
    ours_us: dict[int, float] = field(default_factory=dict)
    ggml_us: dict[int, float] = field(default_factory=dict)
    fault: str = ""
    passes: bool = False

    @property
    def left(self) -> range:
        """The rows of passes that are llama.cpp's; a part of them with experts, where its kernel
        for the fewest rows and ours for more are better than either alone, and with matrices of
        which it has a faster one for more columns than the usual."""
        if self.fault:
            return EVERY_PASS
        if isinstance(self.shape, Experts):
            theirs = [n for n, us in self.ours_us.items() if us > self.ggml_us[n]]
            if len(theirs) == len(self.ours_us):
                return EVERY_PASS
            return range(1, max((n for n in theirs if n <= _PLAIN), default=0) + 1)
        if not self.is_ours:
            return EVERY_PASS
        if isinstance(self.shape, Heads):
            return range(0)
        ours = {
            n
            for n, us in self.ours_us.items()
            if n in DECISIVE or us <= self.ggml_us[n] + _SAVED_US
        }
        end = EVERY_PASS.stop
        return range(min(self.ours_us.keys() - range(max(ours) + 1), default=end), end)

    @property
    def is_ours(self) -> bool:
        """Whether ours are right, and the faster ones: with experts for any number of rows, else
        for `DECISIVE` together."""
        if self.fault:
            return False
        if isinstance(self.shape, Experts):
            return all(us <= self.ggml_us[n] for n, us in self.ours_us.items())
        ours, ggml = (sum(us[n] for n in DECISIVE) for us in (self.ours_us, self.ggml_us))
        if isinstance(self.shape, Heads):
            return ours <= _ATTENTION * ggml
        return ours <= ggml + len(DECISIVE) * _SAVED_US

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the shape."""
        return {name: getattr(self, name) for name in ("ours_us", "ggml_us", "fault", "passes")}

    @classmethod
    def from_dict(cls, shape: Kind, kept: Any) -> Finding:
        """Raises ValueError if `kept` is no finding."""
        try:
            ours, ggml = (
                {int(n): float(us) for n, us in kept[name].items()}
                for name in ("ours_us", "ggml_us")
            )
            found = cls(shape, ours, ggml, str(kept["fault"]), bool(kept["passes"]))
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"no finding: {error}") from None
        if not found.fault and not set(DECISIVE) <= ours.keys() & ggml.keys():
            raise ValueError("times are missing")
        return found


def findings(
    shapes: Iterable[Kind],
    device: str,
    cubins: Sequence[bytes],
    of: dict[str, Any],
    say: Callable[[str], None],
    *,
    again: bool = False,
) -> list[Finding]:
    """The findings for each shape on a device of ggml, by trial if there is none yet. `of` is all
    that they depend on: the GPU, its driver, the compiler, the kernels' text. `again` times all
    anew but those with a fault."""
    known: dict[Kind, Finding] = {}
    missing = []
    for shape in sorted(set(shapes), key=_as_list):
        with suppress(ValueError):  # not tried yet, or damaged
            kept = disk_cache.read("kernel-trials", _key(shape, of))
            known[shape] = Finding.from_dict(shape, kept)
        if shape not in known or (again and not known[shape].fault):
            missing.append(shape)
    if missing:
        say("trying kernels on this GPU, once: a few seconds")
    for finding in _tried(missing, device, cubins):
        known[finding.shape] = finding
        if not finding.passes:
            disk_cache.write("kernel-trials", _key(finding.shape, of), finding.as_dict())
    return list(known.values())


def _tried(shapes: Sequence[Kind], device: str, cubins: Sequence[bytes]) -> Iterator[Finding]:
    """A finding for each shape. One child tries them all; if it dies, the next one goes on behind
    the shape it died of."""
    left = list(shapes)
    code = [base64.b64encode(cubin).decode() for cubin in cubins]
    while left:
        request = {"device": device, "cubins": code, "shapes": [_as_list(s) for s in left]}
        limit_s = _START_S + _SHAPE_S * len(left)
        outcome = child.run("dflash_local.cuda.trial", request, limit_s=limit_s, without_gpu=False)
        for said in outcome.said:
            if "found" in said:
                yield Finding.from_dict(left.pop(0), said["found"])
        if outcome.done or not left:
            return
        why = ", ".join(part for part in (outcome.death, outcome.fault) if part)
        why = why or "its trial ended without a reason"
        if outcome.stage == "import":
            for shape in left:
                yield Finding(shape, fault=f"its trial did not begin: {why}", passes=True)
            return
        yield Finding(left.pop(0), fault=why, passes=outcome.short and bool(outcome.death))


def main(request: dict[str, Any]) -> None:
    """In the child: try one shape after the other."""
    child.die_quietly()
    runtime.init()
    cubins = [base64.b64decode(code) for code in request["cubins"]]
    for kind, *numbers in request["shapes"]:
        shape = _KINDS[kind](*numbers)
        child.say(stage=str(shape))
        child.say(found=_found(request["device"], cubins, shape).as_dict())
    child.say(done=True)


def _found(device: str, cubins: Sequence[bytes], shape: Kind) -> Finding:
    longer = 1.0
    try:
        if isinstance(shape, Experts):
            trial = native.try_few_rows_experts(device, cubins, *astuple(shape))
        elif isinstance(shape, Heads):
            trial = native.try_few_rows_attention(device, cubins, *astuple(shape))
        else:
            rows = tried_rows(shape)
            longer = shape.rows / rows
            trial = native.try_few_rows(device, cubins, shape.type, shape.k, rows)
    except DflashError as error:
        return Finding(shape, fault=str(error), passes="no room" in str(error))
    fault = ""
    if not trial["error"] <= _MOST_ERROR:
        fault = f"its results are off by {trial['error']:.2g} of their size"
    elif not trial["same_bits"]:
        fault = "its results depend on the columns beside them"
    ours, ggml = (
        {n: us * longer for n, us in zip(trial["columns"], trial[name], strict=True)}
        for name in ("ours_us", "ggml_us")
    )
    return Finding(shape, ours, ggml, fault)


def tried_rows(shape: Shape) -> int:
    """As many rows as a trial takes of a matrix."""
    most = max(_MOST_BYTES // shape.row_bytes // _ROWS * _ROWS, _ROWS)
    return min(shape.rows, most)


def _as_list(shape: Kind) -> list[Any]:
    return [type(shape).__name__, *astuple(shape)]


def _key(shape: Kind, of: dict[str, Any]) -> dict[str, Any]:
    return of | {"shape": _as_list(shape)}
