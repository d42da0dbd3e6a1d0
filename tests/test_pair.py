"""What a pair of files would take on a machine, and what it drafts there."""

from __future__ import annotations

from pathlib import Path

from dflash_local import load
from dflash_local.fit.options import LoadOptions
from dflash_local.llama import runtime
from dflash_local.llama.runtime import Device
from dflash_local.pair import open_pair, usual_shape
from dflash_local.setup import Setup


def test_what_a_pair_would_take_is_what_it_takes(pair: tuple[Path, Path]) -> None:
    wanted = {"n_ctx": 512, "n_gpu_layers": 0, "n_seq": 2, "draft_shape": "tree"}
    plan = Setup(open_pair(*pair), LoadOptions(**wanted), runtime.devices()).plan
    with load(*pair, **wanted, n_threads=1, quiet=True) as model:
        assert model.plan is not None
        assert model.plan.host.needed == plan.host.needed
        assert (model.plan.n_ctx, model.plan.mapped_bytes) == (plan.n_ctx, plan.mapped_bytes)


def test_drafts_are_trees_or_chains_where_rows_are_cheap() -> None:
    cpu = Device("CPU", "", "cpu", 1 << 30, 1 << 30)
    gpu = Device("CUDA0", "", "gpu", 1 << 30, 1 << 30)
    assert usual_shape([cpu], LoadOptions()) == "chain"
    assert usual_shape([gpu, cpu], LoadOptions()) == "auto"
    assert usual_shape([gpu, cpu], LoadOptions(n_gpu_layers=0)) == "chain"
