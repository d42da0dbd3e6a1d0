"""Plans of tensors, without a checkpoint behind them."""

import gguf

from dflash_local.convert.tensors.plan import TensorPlan


def plans(name: str, shape: tuple[int, ...]) -> TensorPlan:
    """A plan that copies a tensor; `shape` has the row length first."""
    return TensorPlan(name, f"hf.{name}", shape)


def plan_of(tensor: gguf.ReaderTensor) -> TensorPlan:
    """The plan of a tensor in a GGUF file."""
    return plans(tensor.name, tuple(int(extent) for extent in tensor.shape))
