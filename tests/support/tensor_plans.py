"""Plans of tensors, without a checkpoint behind them."""

from __future__ import annotations

from typing import Any

import gguf

from dflash_local.convert.tensors.plan import TensorPlan


def plans(name: str, shape: tuple[int, ...], role: Any = "matrix") -> TensorPlan:
    """A plan that copies a tensor; `shape` has the row length first."""
    return TensorPlan(name, f"hf.{name}", shape, role)


def plan_of(tensor: gguf.ReaderTensor) -> TensorPlan:
    """The plan of a tensor of a Qwen3-type drafter in a GGUF file."""
    role = "norm" if "norm" in tensor.name else "fc" if tensor.name == "fc.weight" else "matrix"
    return plans(tensor.name, tuple(int(extent) for extent in tensor.shape), role)
