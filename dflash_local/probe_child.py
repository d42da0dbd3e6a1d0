"""The child process of `probe`: does what llama.cpp may abort on, and says how far it came.

One JSON object a line on stdout: `{"stage": name}` as a stage begins, then `{"done": true}` or
`{"fault": text}`, which is about the stage begun last. A stage without either killed the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

_N_CTX = 64


class _Fault(Exception):
    pass


def main(request: dict[str, Any]) -> None:
    """Run all stages for `request`: target, draft (or null), layers, n_gpu_layers, trial (null, or
    what it takes to draft a block in llama.cpp's own context)."""
    die_quietly()
    try:
        _stages(request)
        say(done=True)
    except (_Fault, ImportError) as fault:
        say(fault=str(fault))


def _stages(request: dict[str, Any]) -> None:
    say(stage="import")
    from . import runtime, seam  # noqa: F401 - that the compiled part is there and fits, too
    from .probe_product import wrong_product

    runtime.init()
    say(stage="product")
    wrong = wrong_product()
    if wrong:
        raise _Fault(wrong)
    if request["draft"]:
        say(stage="draft")
        _read_header(os.fsencode(request["draft"]))
    target = os.fsencode(request["target"])
    say(stage="vocabulary")
    _try_vocabulary(target)
    say(stage="load")
    _try_model(target, request)


def _read_header(path: bytes) -> None:
    from . import runtime

    class InitParams(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    runtime.clear_log()
    init = runtime.function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, InitParams)
    header = init(path, InitParams(True, None))
    if not header:
        raise _Fault(runtime.first_error_line() or "no header")
    runtime.function("gguf_free", None, ctypes.c_void_p)(header)


def _try_vocabulary(path: bytes) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = _loaded(path, params)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    # begin- and end-of-text tokens are asserted upon when a text is tokenized
    tokens = (llama_cpp.llama_token * 64)()
    llama_cpp.llama_tokenize(vocabulary, b"a b\n", 4, tokens, len(tokens), True, True)
    llama_cpp.llama_model_free(model)


def _try_model(path: bytes, request: dict[str, Any]) -> None:
    import llama_cpp

    from . import runtime

    n_gpu_layers = request["n_gpu_layers"]
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    # rearranged weights are a copy in memory; `probe_product` has tried the products themselves
    params.use_extra_bufts = False
    model = _loaded(path, params)
    say(stage="context")
    runtime.clear_log()
    context = llama_cpp.llama_init_from_model(model, _context_params(n_gpu_layers))
    if not context:
        raise _Fault(runtime.first_error_line() or "no context")
    passes = _try_passes(model, context, request["layers"])
    if request["trial"]:
        _try_drafter(request["draft"], context, n_gpu_layers, request["trial"])
    llama_cpp.llama_free(context)
    del passes  # after the context, whose graph it is part of
    llama_cpp.llama_model_free(model)


def _try_passes(model: Any, context: Any, layers: list[int]) -> Any:
    """Two rows and one, as `Target` decodes them; returns the `seam.TargetPass`."""
    import llama_cpp

    from . import runtime, seam
    from .errors import DflashError

    say(stage="taps")
    try:
        passes = seam.TargetPass(context, 1, _N_CTX, layers, _N_CTX, True)
        say(stage="decode")
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        for positions in ([0, 1], [2]):
            runtime.clear_log()
            n = len(positions)
            tokens = [position % n_vocab for position in positions]
            status = passes.decode(tokens, positions, [0] * n, [True] * n)
            if status != 0:
                raise _Fault(runtime.first_error_line() or f"llama_decode returned {status}")
            if layers:
                passes.hidden_states([passes.first_stored])
    except DflashError as fault:
        raise _Fault(str(fault)) from None
    return passes


def _try_drafter(path: str, target: Any, n_gpu_layers: int, trial: dict[str, Any]) -> None:
    import numpy as np

    from .errors import DflashError
    from .llama_context import ContextOptions, DraftContext, Placement

    say(stage="draft load")
    size = trial["block_size"]
    options = ContextOptions(
        n_seq=1,
        n_cells=_N_CTX + size,
        n_rows=max(2, size),
        n_threads=_n_threads(),
        causal=trial["causal"],
        lattice=trial["lattice"],
    )
    try:
        context = DraftContext(path, target, Placement(n_gpu_layers), options)
        say(stage="draft decode")
        context.inject(np.zeros((2, trial["n_features"]), np.float32), [0, 1], [0, 0])
        tokens = [0] + [trial["mask_token_id"]] * (size - 1)
        context.draft(tokens, range(2, 2 + size), [0] * size)
        context.lattice(size) if trial["lattice"] else context.logits(size)
        context.close()
    except DflashError as fault:
        raise _Fault(str(fault)) from None


def _context_params(n_gpu_layers: int) -> Any:
    import llama_cpp

    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = _N_CTX
    params.n_seq_max = 1
    params.n_outputs_max = params.n_outputs_max_per_seq = _N_CTX
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = _n_threads()
    params.offload_kqv = params.op_offload = n_gpu_layers != 0
    return params


def _n_threads() -> int:
    """Threads that must share a core wait for each other far longer than they work."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def _loaded(path: bytes, params: Any) -> Any:
    import llama_cpp

    from . import runtime

    runtime.clear_log()
    model = llama_cpp.llama_model_load_from_file(path, params)
    if not model:
        raise _Fault(runtime.first_error_line() or "no model")
    return model


def die_quietly() -> None:
    """No core file, no dialog: dying is one of the answers that this process is there to give."""
    if sys.platform == "win32":
        ctypes.windll.kernel32.SetErrorMode(0x8003)
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def say(**fields: Any) -> None:
    """One line of JSON for the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
