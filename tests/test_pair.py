"""The memory that a pair of files would take on a machine, and its drafts there."""

from pathlib import Path
from typing import Any

import tiny_coder
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


def test_a_small_model_lies_where_the_target_s_logits_are() -> None:
    cpu = Device("CPU", "", "cpu", 1 << 34, 1 << 34)
    first, last = (Device(f"CUDA{i}", "", "gpu", 1 << 34, 1 << 34) for i in (0, 1))
    worker = Device("RPC0", "", "gpu", 1 << 34, 1 << 34, is_remote=True)
    target = tiny_coder.pair()[0]

    def place(*devices: Device, **options: Any) -> int | None:
        setup = Setup(open_pair(target, target), LoadOptions(n_ctx=512, **options), devices)
        found = setup.model_drafter_options
        return found.main_gpu if found.n_gpu_layers else None

    assert place(first, last, cpu, split_mode="none", main_gpu=1) == 1
    assert place(worker, first, cpu, rpc=["worker:50052"]) == 0
    assert place(worker, cpu, rpc=["worker:50052"]) is None
    assert place(first, cpu) == 0
    assert place(first, cpu, n_gpu_layers=0) is None


def test_a_small_model_has_no_window() -> None:
    cpu = Device("CPU", "", "cpu", 1 << 34, 1 << 34)
    target, draft = tiny_coder.pair()
    options = LoadOptions(n_ctx=512, draft_window=64)
    assert "for the last 64 tokens" in str(Setup(open_pair(target, draft), options, [cpu]).lines())
    assert "for the last" not in str(Setup(open_pair(target, target), options, [cpu]).lines())
