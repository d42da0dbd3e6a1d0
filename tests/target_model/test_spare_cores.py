"""The number of threads that compute beside other processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest

from dflash_local.target_model import pass_threads
from dflash_local.target_model.pass_threads import CpuTime, SpareCores, cpu_time, n_beside


@pytest.mark.parametrize(
    ("n_now", "n_most", "n_cpus", "others", "expected"),
    [
        (2, 2, 2, 0.0, 2),  # quiet
        (2, 2, 2, 0.4, 2),  # what runs in the background of every machine
        (2, 2, 2, 0.7, 1),  # one busy process, which has to share
        (1, 2, 2, 1.0, 1),  # which has a core of its own now
        (1, 2, 2, 0.4, 1),  # it pauses, perhaps
        (1, 2, 2, 0.2, 2),  # it has ended
        (1, 2, 2, 1.4, 1),  # two of them
        (16, 16, 16, 1.0, 15),
        (16, 16, 16, 12.0, 8),  # a fair share
        (8, 8, 32, 20.0, 8),  # there is room for all
        (8, 8, 32, 26.0, 6),
        (1, 1, 2, 2.0, 1),
    ],
)
def test_other_processes_find_cores(
    n_now: int, n_most: int, n_cpus: int, others: float, expected: int
) -> None:
    assert n_beside(n_now, n_most, n_cpus, others) == expected


def looks(*steps: tuple[float, float, float]) -> Iterator[CpuTime | None]:
    """The system's times at each look: (of the clock, of all, of our own) since the last one."""
    sums = accumulate(steps, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)))
    return (CpuTime(clock, all_, own, 2) for clock, all_, own in sums)


QUIET, BESIDE_ONE, ALONE = (0.5, 1.0, 1.0), (0.5, 1.0, 0.5), (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((QUIET, BESIDE_ONE, BESIDE_ONE, ALONE), [2, 1, 1, 2]),  # only the time of others counts
        (((3600.0, 7200.0, 0.0), ALONE), [2, 2]),  # looks before a pause say nothing
        ((None,), [2]),  # a system that does not tell
    ],
)
def test_looks_at_a_system(monkeypatch: pytest.MonkeyPatch, steps: Any, expected: Any) -> None:
    monkeypatch.setattr(pass_threads, "_LOOK_S", 0.0)  # at each pass
    found = iter([None, None]) if None in steps else looks((0.0, 0.0, 0.0), *steps)
    cores = SpareCores(2, lambda: next(found))
    assert [cores.n_threads() for _ in expected] == expected


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/stat")
def test_times_of_this_machine_only_grow() -> None:
    found = [cpu_time() for _ in range(3)]
    assert None not in found
    for before, now in pairwise(found):
        assert now.clock >= before.clock and now.all >= before.all and now.own >= before.own
        assert now.n_cpus >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it so")
def test_work_of_low_priority_counts_its_own() -> None:
    """Without it, what others do on the cores is taken for less by all that is ours."""
    work = """
import json, os, time
from pathlib import Path
os.nice(5)
from dflash_local.target_model.pass_threads import cpu_time
while time.process_time() < 0.4:  # so that there is some such work
    pass
ours = {f"cpu{n}" for n in os.sched_getaffinity(0)}
def seconds():
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = sum(int(row[i]) for row in rows if row[0] in ours for i in (1, 2, 3, 6, 7))
    return ticks / os.sysconf("SC_CLK_TCK")
print(json.dumps([seconds(), cpu_time().all, seconds()]))
"""
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True)
    before, counted, after = json.loads(done.stdout)
    assert before - 0.1 < counted < after + 0.1
