"""The tensors of a DFlash drafter: they tell its family, and are checked.

Names and shapes are those of llama.cpp's `src/models/dflash.cpp`.
"""

import re

import numpy as np
from numpy.typing import NDArray

from dflash_local.errors import FileError
from dflash_local.gguf.drafter_spec import DrafterSpec, Family, SelectorSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.gguf.header import TensorInfo

_Shape = tuple[int, ...]

SELECTOR = "selector_hidden.weight"
MARKOV = "markov_w1.weight"
TOKEN_TABLES = (MARKOV, "selector_predecessor.weight")
"""Tables of the tokens before. The host reads the anchor's row, the graph those of drafted tokens:
each has a copy."""
D2T = "d2t"

BIASED = ("attn_q", "attn_k", "attn_v", "attn_output")
"""llama.cpp knows biases of these in other architectures, but in no drafter."""
_BIAS = re.compile(r"blk\.\d+\..*\.bias")
_KNOWN = re.compile(
    r"(fc|enc\.output_norm|output_norm|token_embd|output|rope_freqs|markov_w[12])\.weight"
    r"|selector_(predecessor|successor|hidden)\.weight"
    r"|d2t|conf_proj\.(weight|bias)|(fc|output|markov_w2)\.scale"
    r"|blk\.\d+\.(attn_(norm|q|k|v|output|q_norm|k_norm|sinks)\.weight"
    r"|(post_attention_norm|post_ffw_norm|layer_output_scale)\.weight"
    r"|ffn_(norm|gate|up|down)\.weight|(attn|ffn)_conv_(base|proj\.weight)"
    r"|attn_(q|k|v|output)\.(bias|scale)|ffn_(gate|up|down)\.scale)"
)
_HYPER_CONNECTIONS = re.compile(r"^output_hc_|\.hc_")

# ggml stores these types but cannot multiply with them
_NOT_MULTIPLIED = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})


def drafter_family(file: GgufFile) -> Family:
    """The family, told by the heads on top. Raises FileError for unknown tensors."""
    unknown = [name for name in file.tensors if not _KNOWN.fullmatch(name)]
    if unknown:
        deepseek = any(_HYPER_CONNECTIONS.search(name) for name in unknown)
        kind = "DSpark on DeepSeek-V4 (hyper-connections)" if deepseek else "unknown to us"
        listed = ", ".join(unknown[:4])
        listed += f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        file.fail(
            f"a drafter of the kind {kind}, which this version does not run (tensors {listed}); "
            "use a DFlash drafter without these"
        )
    if SELECTOR in file.tensors and MARKOV in file.tensors:
        file.fail(
            f"tensors {SELECTOR} and {MARKOV}: a path selector (DFlash 2) and a Markov head "
            "(DSpark) in one file, expected one of them"
        )
    if SELECTOR in file.tensors:
        return "dflash2"
    return "dspark" if MARKOV in file.tensors else "dflash"


def has_bias(file: GgufFile) -> bool:
    """Whether a projection of the attention has a bias. llama.cpp loads none of them."""
    return any(_BIAS.fullmatch(name) for name in file.tensors)


def lacks_values(file: GgufFile) -> bool:
    """Whether no layer has `attn_v`: values are then made from the keys. It must not be absent in
    some layers only."""
    return not any(name.endswith(".attn_v.weight") for name in file.tensors)


def check_tensors(file: GgufFile, spec: DrafterSpec) -> None:
    """Raise FileError, with a line per fault, if a tensor is missing or not as `spec` says."""
    required, optional = expected_shapes(spec)
    if D2T in file.tensors:
        # without a head of its own, llama.cpp would use this table for rows of the target's head
        required |= {D2T: (spec.n_vocab_draft,), "output.weight": optional.pop("output.weight")}
    faults = [f"tensor {name} is missing" for name in required if name not in file.tensors]
    expected = required | optional
    for name, tensor in file.tensors.items():
        fault = _type_fault(tensor)
        if fault:
            faults.append(fault)
        if name not in expected:
            faults.append(_misplaced(name, spec))
        elif _trimmed(tensor.shape) != _trimmed(expected[name]):
            faults.append(
                f"tensor {name} has the shape {list(tensor.shape)}, expected {list(expected[name])}"
            )
    if not faults and D2T in file.tensors:
        table = file.tensors[D2T]
        ids = np.frombuffer(file.data(table, 0, table.n_bytes), "<i8")
        faults = ids_faults(ids, spec.n_vocab)
    if faults:
        more = f"\n(and {len(faults) - 8} more)" if len(faults) > 8 else ""
        raise FileError("\n".join(f"{file.path}: {fault}" for fault in faults[:8]) + more)


def _misplaced(name: str, spec: DrafterSpec) -> str:
    if re.match(rf"blk\.({'|'.join(map(str, range(spec.n_layer)))})\.", name):
        return f"tensor {name} belongs to another family than the rest, {spec.family}"
    if name.startswith("blk."):
        return f"tensor {name} is beyond dflash.block_count {spec.n_layer}"
    return f"tensor {name} has no place in a drafter of the family {spec.family}"


def _type_fault(tensor: TensorInfo) -> str:
    name, found = tensor.name, tensor.type_name
    if name == D2T:
        return "" if found == "I64" else f"tensor {name} has the type {found}, expected I64"
    # added or multiplied element by element, not in a matrix product
    row = len(_trimmed(tensor.shape)) == 1 and name != "conf_proj.weight"
    if (row or name.endswith("_conv_base")) and found != "F32":
        return f"tensor {name} has the type {found}, expected F32"
    if found in _NOT_MULTIPLIED:
        return f"tensor {name} has the type {found}, expected a weight type"
    return ""


def expected_shapes(spec: DrafterSpec) -> tuple[dict[str, _Shape], dict[str, _Shape]]:
    """Shapes, in ggml's order, of the weights that must be there and of those that may."""
    n_embd, n_ff, head = spec.n_embd, spec.n_ff, spec.head_dim
    n_q, n_kv = spec.n_head * head, spec.n_head_kv * head
    required: dict[str, _Shape] = {
        "fc.weight": (spec.n_taps * n_embd, n_embd),
        "enc.output_norm.weight": (n_embd,),
        "output_norm.weight": (n_embd,),
    }
    optional: dict[str, _Shape] = {
        "token_embd.weight": (n_embd, spec.n_vocab),
        "output.weight": (n_embd, spec.n_vocab_draft),
        "rope_freqs.weight": (head // 2,),
        "fc.scale": (1,),
        "output.scale": (1,),
    }
    layer_weights: dict[str, _Shape] = {
        "attn_norm": (n_embd,),
        "attn_q": (n_embd, n_q),
        "attn_k": (n_embd, n_kv),
        "attn_v": (n_embd, n_kv),
        "attn_output": (n_q, n_embd),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "ffn_norm": (n_embd,),
        "ffn_gate": (n_embd, n_ff),
        "ffn_up": (n_embd, n_ff),
        "ffn_down": (n_ff, n_embd),
    }
    for layer in range(spec.n_layer):
        block = f"blk.{layer}."
        for weight, shape in layer_weights.items():
            if weight != "attn_v" or not spec.values_from_keys:
                required[f"{block}{weight}.weight"] = shape
            if len(shape) == 2:
                optional[f"{block}{weight}.scale"] = (1,)
        optional |= {
            f"{block}post_attention_norm.weight": (n_embd,),
            f"{block}post_ffw_norm.weight": (n_embd,),
            f"{block}layer_output_scale.weight": (1,),
            f"{block}attn_sinks.weight": (spec.n_head,),
        }
        for weight in BIASED:
            optional[f"{block}{weight}.bias"] = layer_weights[weight][1:]
    if spec.selector is not None:
        required |= _selector_shapes(spec, spec.selector)
    if spec.family == "dspark":
        rank = spec.markov_rank
        required |= {MARKOV: (rank, spec.n_vocab), "markov_w2.weight": (rank, spec.n_vocab_draft)}
        optional |= {
            "markov_w2.scale": (1,),
            "conf_proj.weight": (n_embd + rank, 1),
            "conf_proj.bias": (1,),
        }
    return required, optional


def _selector_shapes(spec: DrafterSpec, selector: SelectorSpec) -> dict[str, _Shape]:
    n_embd, rank, kernel = spec.n_embd, selector.rank, selector.kernel_size
    shapes: dict[str, _Shape] = {
        "selector_predecessor.weight": (rank, spec.n_vocab),
        "selector_successor.weight": (rank, spec.n_vocab),
        "selector_hidden.weight": (n_embd, rank),
    }
    projected = 2 * kernel * (n_embd // selector.group_size)
    for layer in range(spec.n_layer):
        for part in ("attn", "ffn"):
            shapes[f"blk.{layer}.{part}_conv_base"] = (n_embd, kernel, 2)
            shapes[f"blk.{layer}.{part}_conv_proj.weight"] = (n_embd, projected)
    return shapes


def ids_faults(ids: NDArray[np.int64], n_vocab: int) -> list[str]:
    """Faults of `ids`, the tokens that the rows of a head stand for."""
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if len(outside):
        row = int(outside[0])
        return [f"tensor {D2T} maps row {row} to token {ids[row]}, expected 0 to {n_vocab - 1}"]
    if len(np.unique(ids)) != len(ids):
        return [f"tensor {D2T} maps several rows to one token"]
    return []


def _trimmed(shape: _Shape) -> _Shape:
    """`shape` without the ones that ggml pads it with."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
