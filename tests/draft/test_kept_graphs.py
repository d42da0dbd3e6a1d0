"""The memory that a drafter's graphs keep, beside the shared one, is in the plan."""

import subprocess
import sys
from pathlib import Path

import pytest

import tiny_coder

N_SEQ, N_CTX, STEP = 8, 4096, 256

WORK = f"""
import gc
from pathlib import Path
import numpy as np
from dflash_local.draft.drafter import DraftRequest
from dflash_local.fit.footprint import Footprint
from dflash_local.fit.options import LoadOptions
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.loading import open_drafter
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

target_path, path = map(Path, {[str(path) for path in tiny_coder.pair()]})
spec = read_drafter(GgufFile.open(path))
options = LoadOptions(n_ctx={N_CTX}, n_seq={N_SEQ})
plan = Footprint(GgufFile.open(target_path), GgufFile.open(path), spec, options)
target = Target(target_path, TargetOptions(n_ctx=256, n_threads=1))
drafter = open_drafter(path, target, spec, n_seq={N_SEQ}, n_ctx={N_CTX}, for_trees=True)

def draft(length):
    drafter.truncate(0, length)
    drafter.draft([DraftRequest({N_SEQ} - 1, 1, none, 15)])

rows = np.zeros(({N_CTX} - 32, drafter.n_features), np.float32)
none = np.zeros((0, drafter.n_features), np.float32)
drafter.inject(0, rows)
del rows
draft({N_CTX} - 32)
before = resident()
for i in range(7):
    draft({N_CTX} - 32 - (i + 1) * {STEP})
print(drafter.n_builds, resident() - before, 2 * plan.kept_graphs({N_CTX}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_what_graphs_keep_is_planned() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    n_builds, taken, planned = map(int, done.stdout.split())
    assert n_builds >= 8
    # Seven of the eight, and not all as long as the longest.
    assert planned / 3 < taken < planned
