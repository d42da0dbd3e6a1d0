"""The child process of `trial.model`: does everything that llama.cpp may abort on."""

import ctypes
import os
from typing import Any

from dflash_local.errors import BackendError, FileError
from dflash_local.fit.architectures import WayBack
from dflash_local.trial.child import answer, n_threads, say

_N_CTX = 128


def main(request: dict[str, Any]) -> None:
    """Run all stages for `request`: target, draft (or null), layers, n_gpu_layers, way_back (kind
    and rows), for a model of vectors `pooling`, and what else `Setup.how_loaded` says."""
    answer(_stages, request)


def _stages(request: dict[str, Any]) -> None:
    say(stage="import")
    from dflash_local.llama import (
        native,  # noqa: F401 - checks that the compiled part is there and fits
        runtime,
    )
    from dflash_local.trial.product import wrong_product

    runtime.init()
    say(stage="product")
    wrong = wrong_product()
    if wrong:
        raise BackendError(wrong)
    if request["draft"]:
        say(stage="draft")
        _read_header(os.fsencode(request["draft"]))
    target = os.fsencode(request["target"])
    say(stage="vocabulary")
    _try_vocabulary(target)
    say(stage="load")
    _try_model(target, request)


def _read_header(path: bytes) -> None:
    from dflash_local.llama import runtime

    class InitParams(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    runtime.clear_log()
    init = runtime.function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, InitParams)
    header = init(path, InitParams(True, None))
    if not header:
        raise FileError(runtime.first_error_line() or "no header")
    runtime.function("gguf_free", None, ctypes.c_void_p)(header)


def _try_vocabulary(path: bytes) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = loaded(path, params)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    # llama.cpp asserts begin- and end-of-text tokens when a text is tokenized
    tokens = (llama_cpp.llama_token * 64)()
    llama_cpp.llama_tokenize(vocabulary, b"a b\n", 4, tokens, len(tokens), True, True)
    llama_cpp.llama_model_free(model)


def _try_model(path: bytes, request: dict[str, Any]) -> None:
    import llama_cpp

    from dflash_local.llama import runtime

    n_gpu_layers = request["n_gpu_layers"]
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    # rearranged weights would be a copy in memory; `wrong_product` has tried the products
    params.use_extra_bufts = False
    params.load_mtp = request.get("heads", False)
    if keys := request.get("override_kv"):
        runtime.override_keys(params, keys)
    if names := [name for name in request.get("device", ()) if name != "none"]:
        runtime.use_devices(params, map(runtime.device_pointer, names))
    if overrides := request.get("overrides"):
        handles = [(p, runtime.device_pointer(name)) for p, name in overrides.items()]
        runtime.override_buffers(params, handles)
    if split := request.get("tensor_split"):
        params.tensor_split = (ctypes.c_float * llama_cpp.llama_max_devices())(*split)
    model = loaded(path, params)
    if mmproj := request.get("mmproj"):
        say(stage="projector")
        _try_projector(os.fsencode(mmproj[0]), model, n_gpu_layers != 0)
    say(stage="context")
    runtime.clear_log()
    settings = _context_params(n_gpu_layers)
    settings.n_rs_seq = WayBack(**request["way_back"]).by("snapshots")
    pooling = request.get("pooling")
    if pooling is not None:
        settings.embeddings, settings.pooling_type = True, pooling
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise FileError(runtime.first_error_line() or "no context")
    passes = None
    if pooling is None:
        passes = _try_passes(model, context, request)
        if request.get("heads"):
            say(stage="heads")
            _try_heads(model, n_gpu_layers)
        if request.get("assistant"):
            say(stage="assistant")
            # With the target's devices, whose cells it reads. These keys are the target's own.
            params.kv_overrides = params.tensor_buft_overrides = params.tensor_split = None
            params.n_gpu_layers = -1 if n_gpu_layers else 0
            assistant = loaded(os.fsencode(request["draft"]), params)
            _try_heads(assistant, n_gpu_layers, beside=context)
            llama_cpp.llama_model_free(assistant)
    else:
        _try_embedding(context)
    llama_cpp.llama_free(context)
    del passes  # after the context, whose graph it is part of
    llama_cpp.llama_model_free(model)


def _try_projector(path: bytes, model: Any, use_gpu: bool) -> None:
    from dflash_local.llama import runtime
    from dflash_local.llama.runtime import libmtmd

    mtmd = libmtmd()
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.warmup, params.n_threads = use_gpu, True, n_threads()
    runtime.clear_log()
    context = mtmd.mtmd_init_from_file(path, model, params)
    if not context:
        raise FileError(runtime.first_error_line() or "no projector for this target")
    mtmd.mtmd_free(context)


def _try_passes(model: Any, context: Any, request: dict[str, Any]) -> Any:
    """Decode a few rows, then one, as `Target` does. With snapshots or replay, rows are taken back
    in between. Returns the `native.TargetPass`."""
    import llama_cpp

    from dflash_local.llama import native, runtime

    say(stage="taps")
    layers, way_back = request["layers"], WayBack(**request["way_back"])
    address = native.address(context)
    if request.get("heads"):
        native.keep_states_of_all_rows(address)
    n_replayed = way_back.by("replay") if native.can_replay(address) else 0
    threads = native.ThreadPool(n_threads())
    passes = native.TargetPass(address, 1, layers, _N_CTX, True, 1, n_replayed, threads)
    say(stage="decode")
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    n_snapshots = way_back.by("snapshots")
    n_rows = 1 + max(n_snapshots, n_replayed, 1)
    for is_first in (True, False):
        positions = list(range(n_rows)) if is_first else [n_rows]
        # Where rows cannot be replayed, `load` will see it and try another way.
        if not is_first and passes.can_keep:
            passes.keep(0, 1)
            positions = [1]
        if not is_first and n_snapshots:
            memory = llama_cpp.llama_get_memory(context)
            llama_cpp.llama_memory_seq_rm(memory, 0, 1, -1)
            positions = [1]
        runtime.clear_log()
        n = len(positions)
        tokens = [position % n_vocab for position in positions]
        status = passes.decode(tokens, positions, [0] * n, [True] * n)
        if status != 0:
            raise FileError(runtime.first_error_line() or f"llama_decode returned {status}")
        if layers:
            passes.hidden_states([passes.first_stored])
    return passes


def _try_heads(model: Any, n_gpu_layers: int, beside: Any = None) -> None:
    """Decode rows in llama.cpp's context for the layers that predict further tokens. An assistant's
    is `beside` that of the target."""
    import llama_cpp
    import numpy as np

    from dflash_local.llama import native, runtime

    runtime.clear_log()
    params = _context_params(n_gpu_layers)
    params.ctx_type, params.ctx_other = llama_cpp.LLAMA_CONTEXT_TYPE_MTP, beside
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise FileError(runtime.first_error_line() or "no context")
    layers, address = [llama_cpp.llama_model_n_layer(model)], native.address(context)
    passes = native.TargetPass(address, 1, layers, _N_CTX, True)
    states = np.zeros((2, llama_cpp.llama_model_n_embd_out(model)), np.float32)
    if status := passes.decode([0, 0], [0, 1], [0, 0], [False, True], (), states):
        raise FileError(runtime.first_error_line() or f"llama_decode returned {status}")
    passes.hidden_states([passes.first_stored])
    llama_cpp.llama_free(context)


def _try_embedding(context: Any) -> None:
    import llama_cpp

    from dflash_local.llama import runtime

    say(stage="embed")
    runtime.clear_log()
    tokens = (llama_cpp.llama_token * 2)()
    run = llama_cpp.llama_decode if llama_cpp.llama_get_memory(context) else llama_cpp.llama_encode
    if status := run(context, llama_cpp.llama_batch_get_one(tokens, len(tokens))):
        raise FileError(runtime.first_error_line() or f"llama.cpp returned {status}")


def _context_params(n_gpu_layers: int) -> Any:
    import llama_cpp

    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = _N_CTX
    params.n_seq_max = 1
    params.n_outputs_max = params.n_outputs_max_per_seq = _N_CTX
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = n_threads()
    params.offload_kqv = params.op_offload = n_gpu_layers != 0
    return params


def loaded(path: bytes, params: Any) -> Any:
    """A model. Raises FileError if llama.cpp refuses it."""
    import llama_cpp

    from dflash_local.llama import runtime

    runtime.clear_log()
    model = llama_cpp.llama_model_load_from_file(path, params)
    if not model:
        raise FileError(runtime.first_error_line() or "no model")
    return model
