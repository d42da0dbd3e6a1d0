"""The child process of `drafter`: loads a drafter and, with a target, drafts a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_local.trial.child import die_quietly, n_threads, say

if TYPE_CHECKING:
    from dflash_local.gguf.drafter_spec import DrafterSpec

TARGET_STAGE = "loading the target"

_N_CELLS = 64
_N_ROWS = 2  # rows of context that the block sees


def main(request: dict[str, Any]) -> None:
    """Run all stages for `request`: see `drafter.try_drafter`."""
    die_quietly()
    from dflash_local.errors import DflashError

    try:
        _stages(request)
        say(done=True)
    except (DflashError, ImportError) as fault:
        say(fault=str(fault))


def _stages(request: dict[str, Any]) -> None:
    from dflash_local.llama import runtime

    runtime.init()
    spec = _spec(request["spec"])
    if not spec.attention_bias:
        with _stage("loading by llama.cpp", "llama.cpp takes its keys, vocabulary and tensors"):
            _model(request["drafter"], no_alloc=True)
    if request["target"] is None:
        return
    say(stage=TARGET_STAGE)
    model = _model(request["target"])
    with _stage("drafting in the fused graph", "the fused graph drafts a block"):
        _draft_fused(request["drafter"], spec, model)
    if not spec.attention_bias:
        with _stage("drafting in llama.cpp", "llama.cpp drafts a block"):
            _draft_in_llama_cpp(request["drafter"], spec, model)


def _spec(fields: dict[str, Any]) -> DrafterSpec:
    from dflash_local.gguf.drafter_spec import DrafterSpec, RopeSpec, ScaleSpec, SelectorSpec

    selector = fields["selector"] and SelectorSpec(**fields["selector"])
    rope, scales = RopeSpec(**fields["rope"]), ScaleSpec(**fields["scales"])
    return DrafterSpec(**{**fields, "rope": rope, "scales": scales, "selector": selector})


def _model(path: str, *, no_alloc: bool = False) -> Any:
    """A loaded model. Its weights stay in the file; with `no_alloc` they are not read at all."""
    import llama_cpp

    from dflash_local.errors import FileError
    from dflash_local.llama import runtime

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    # rearranged weights would be a copy in memory
    params.use_extra_bufts = False
    if no_alloc:
        params.no_alloc = True
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE  # it asserts that nothing is mapped
    runtime.clear_log()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise FileError(runtime.first_error_line() or "no model")
    return model


def _draft_fused(path: str, spec: DrafterSpec, model: Any) -> None:
    import numpy as np

    from dflash_local.llama import native

    drafter = native.FusedDrafter(model, None, path, spec, 1, _N_CELLS, 1, n_threads())
    features = np.zeros((_N_ROWS, spec.n_features), np.float32)
    drafter.begin([0], [features], [0], spec.n_draft)
    drafter.read()


def _draft_in_llama_cpp(path: str, spec: DrafterSpec, model: Any) -> None:
    import llama_cpp
    import numpy as np

    from dflash_local.errors import BackendError
    from dflash_local.llama import runtime
    from dflash_local.trial.draft_context import ContextOptions, DraftContext

    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = _N_CELLS
    params.n_threads = params.n_threads_batch = n_threads()
    params.offload_kqv = params.op_offload = False
    runtime.clear_log()
    target = llama_cpp.llama_init_from_model(model, params)
    if not target:
        raise BackendError(runtime.first_error_line() or "no context of the target")
    size = spec.block_size
    lattice = spec.selector is not None
    options = ContextOptions(
        n_seq=1,
        n_cells=_N_CELLS + size,
        n_rows=max(_N_ROWS, size),
        n_threads=n_threads(),
        causal=spec.causal,
        lattice=lattice,
    )
    context = DraftContext(path, target, options)
    features = np.zeros((_N_ROWS, spec.n_features), np.float32)
    context.inject(features, list(range(_N_ROWS)), [0] * _N_ROWS)
    tokens = [0] + [spec.mask_token_id] * (size - 1)
    context.draft(tokens, range(_N_ROWS, _N_ROWS + size), [0] * size)
    context.lattice(size) if lattice else context.logits(size)


@contextmanager
def _stage(name: str, passed: str) -> Iterator[None]:
    say(stage=name)
    yield
    say(passed=passed)
