"""Decides from headers whether a model can be used, and whether a target and a drafter fit."""

import reprlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dflash_local.errors import InputError, PairError
from dflash_local.fit.architectures import (
    EMBEDDING_ARCHITECTURES,
    GRAPHED_HEADS,
    HEADS_ARCHITECTURES,
    NOT_GENERATIVE_ARCHITECTURES,
    OWN_STATE_ARCHITECTURES,
    RECURRENT_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
    rolls_back,
)
from dflash_local.fit.options import POOLINGS, Pooling
from dflash_local.gguf.drafter_keys import MAX_LAYERS, OLD_ARCHITECTURES, read_drafter, refuse_old
from dflash_local.gguf.drafter_spec import (
    AssistantSpec,
    DrafterSpec,
    FileSpec,
    HeadLayerSpec,
    HeadsSpec,
    ModelSpec,
    RopeSpec,
)
from dflash_local.gguf.file import GgufFile

ASSISTANT, _ASSISTED = "gemma4-assistant", "gemma4"
"""The architecture of a drafter that attends to its target's cells, and that of the target."""
_WINDOWS = "attention.sliding_window_pattern"
_TOKENS = "tokenizer.ggml.tokens"
_SOFTMAX, _SIGMOID = 1, 2  # of `expert_gating_func`
_MOST_UNUSED = 128  # as llama.cpp has it for speculative decoding
_SIZES = (
    "attention.key_length", "attention.key_length_mla", "attention.key_length_swa",
    "attention.kv_lora_rank", "attention.shared_kv_layers", "attention.sliding_window",
    "attention.value_length", "attention.value_length_swa", "kda.head_dim", "nextn_predict_layers",
    "rope.dimension_count", "rope.dimension_count_swa", "shortconv.l_cache", "ssm.conv_kernel",
    "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank",
)  # fmt: skip
_SIZES_OF_LAYERS = (
    "attention.head_count", "attention.head_count_kv", "expert_feed_forward_length",
    "expert_used_count", "feed_forward_length",
)  # fmt: skip
"""Keys that a plan counts with; of these, a model may have one number for each layer."""
_LARGEST = 1 << 17
"""Of those that one number stands for. Caches grow with some that no tensor confirms."""
_LONGEST_WINDOW = 1 << 24
"""Tokens. llama.cpp takes four bytes for each in a pass: 17 GB where a damaged file says 2^32."""
_PLAIN = "or leave the drafter out for plain decoding"


def check_target(file: GgufFile) -> None:
    """Raise FileError unless `file` is a language model that may be a target."""
    check_model(file)


def check_model(file: GgufFile, takes: Container[str] = ()) -> None:
    """Raise FileError unless `file` is a model that llama.cpp can load. It is one that writes text,
    unless its architecture is among those that are taken, too."""
    architecture = file.architecture
    refuse_old(file)
    if architecture == "dflash":
        file.fail(
            "a DFlash drafter (general.architecture 'dflash') given as the target; give it as the "
            "draft model, and the model that it was trained for as the target"
        )
    if architecture == ASSISTANT and architecture not in takes:
        file.fail("a Gemma 4 assistant given as the target; give it as the draft model")
    if architecture in NOT_GENERATIVE_ARCHITECTURES and architecture not in takes:
        known = architecture in EMBEDDING_ARCHITECTURES
        file.fail(
            f"general.architecture is {architecture!r}, expected a language model that writes text "
            "from left to right" + "; `dflash-local serve` serves embedding models" * known
        )
    kind = file.optional("general.type", str, "model")
    if kind != "model":
        file.fail(f"general.type is {kind!r}, expected 'model'; give the model itself")
    for key, high in (
        ("block_count", MAX_LAYERS),
        ("embedding_length", 1 << 31),
        ("context_length", 1 << 31),
    ):
        value = file.require(f"{architecture}.{key}", int)
        if not 1 <= value <= high:
            file.fail(f"{architecture}.{key} is {value}, expected 1 to {high}")
    for key in (*_SIZES, *_SIZES_OF_LAYERS):
        _check_size(file, f"{architecture}.{key}", listed=key in _SIZES_OF_LAYERS)
    for key in _SIZES:
        # With no dimensions to rotate, ggml never ends; with empty heads, it has no cache.
        low = int(key.startswith(("rope.", "attention.key_length", "attention.value_length")))
        high = _LONGEST_WINDOW if key == "attention.sliding_window" else _LARGEST
        value = file.get(f"{architecture}.{key}", low)
        if not low <= value <= high:
            file.fail(f"{architecture}.{key} is {value}, expected {low} to {high}")
    for key in ("attention.head_count", "attention.head_count_kv"):
        no_heads = file.get(f"{architecture}.{key}") == 0
        if no_heads and architecture not in RECURRENT_ARCHITECTURES:
            file.fail(f"{architecture}.{key} is 0, expected 1 or more")
    if not file.require(_TOKENS, list):
        file.fail(f"key '{_TOKENS}' is empty, expected the vocabulary")
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        file.fail("tensor token_embd.weight is missing: a vocabulary without a model")
    expected = [file.metadata[f"{architecture}.embedding_length"], file.n_vocab]
    if list(embeddings.shape) != expected:
        file.fail(
            f"tensor token_embd.weight has the shape {list(embeddings.shape)}, expected "
            f"{expected}: embedding_length and the number of tokens"
        )


def _check_size(file: GgufFile, key: str, *, listed: bool) -> None:
    value = file.get(key, 0)
    values = value if listed and isinstance(value, list) else [value]
    if not all(type(each) is int and 0 <= each < 1 << 32 for each in values):
        several = ", or one for each layer" if listed else ""
        shown = reprlib.repr(value)
        file.fail(f"key '{key}' is {shown}, expected a whole number of 32 bits{several}")


def pooling_of(file: GgufFile) -> Pooling | None:
    """The pooling that a model's file asks for; None for one that writes text."""
    given = file.get(f"{file.architecture}.pooling_type")
    if type(given) is int and 0 < given < len(POOLINGS):
        return POOLINGS[given]
    if file.architecture not in EMBEDDING_ARCHITECTURES:
        return None
    return "rank" if _has_classifier(file) else "none"


def check_embedder(file: GgufFile, pooling: Pooling) -> None:
    """Raise FileError unless `file` is a model that can be used with `pooling`, InputError for one
    of another name."""
    if pooling not in POOLINGS:
        raise InputError(f"pooling is {pooling!r}; give one of {', '.join(POOLINGS)}")
    check_model(file, takes=EMBEDDING_ARCHITECTURES)
    if file.architecture in RECURRENT_ARCHITECTURES:
        file.fail("a model with recurrent layers, of which no embeddings are made here")
    if pooling == "rank" and not _has_classifier(file):
        file.fail("no reranker: it has no tensor cls.weight or cls.output.weight")


def _has_classifier(file: GgufFile) -> bool:
    return not {"cls.weight", "cls.output.weight"}.isdisjoint(file.tensors)


def check_pair(target: GgufFile, drafter: GgufFile) -> FileSpec:
    """The spec of `drafter`, if it fits `target`.

    Raises FileError if `target` is not a target or `drafter` not a drafter, PairError if they do
    not fit each other: the message names the field, both values and what to do.
    """
    check_target(target)
    needs_taps = drafter.architecture == "dflash"
    if fault := _roll_back(target) or (needs_taps and _taps(target)):
        raise PairError(fault)
    spec = read_spec(drafter, target)
    if fault := next(filter(None, _faults(target, drafter, spec)), None):
        raise PairError(fault)
    return spec


def check_heads(target: GgufFile) -> HeadsSpec:
    """The heads of a target's own file, to draft with. Raises FileError if `target` is not a
    target, PairError if it has none that can be used."""
    check_target(target)
    if fault := _roll_back(target):
        raise PairError(fault)
    name, n_heads = target.architecture, n_heads_of(target)
    if not n_heads:
        raise PairError(
            f"{target.path}: has no heads to draft with: no {name}.nextn_predict_layers, or no "
            "tensors of these layers; choose a file that was made with them"
        )
    if name not in HEADS_ARCHITECTURES:
        raise PairError(
            f"{target.path}: heads of {name!r} cannot be used here; expected one of "
            f"{', '.join(sorted(HEADS_ARCHITECTURES))}"
        )
    n_layer = _tappable_layers(target)
    layer = _head_layer(target, n_layer) if n_heads == 1 else f"there are {n_heads} of them"
    return HeadsSpec(n_heads, n_layer, layer)


def _head_layer(target: GgufFile, layer: int) -> HeadLayerSpec | str:
    """The sizes of the layer of a target's head; or in words, why our own graph would not compute
    what llama.cpp does."""

    def number(name: str, usual: float | None = None, kind: type = int) -> Any:
        value = target.get(f"{target.architecture}.{name}", usual)
        value = value[layer] if isinstance(value, list) and layer < len(value) else value
        return value if isinstance(value, kind) else None

    if target.architecture not in GRAPHED_HEADS:
        return f"our graph does not know those of {target.architecture!r}"
    is_glm = target.architecture == "glm4moe"
    prefix = f"{target.architecture}.rope."
    sections = target.get(f"{prefix}dimension_sections") or [0]
    is_scaled = any(name.startswith(f"{prefix}scaling.") for name in target.metadata)
    key_length, value_length = number("attention.key_length"), number("attention.value_length")
    gating = number("expert_gating_func", _SIGMOID) if is_glm else _SOFTMAX
    # With a fourth section a token's other positions would count. GLM's rotate in another order.
    if is_scaled or any(sections[0 if is_glm else 3 :]):
        return "their positions are scaled, or have sections, in a way that our graph does not know"
    if key_length != value_length:
        return f"their keys have {key_length} values, and their values {value_length}"
    if gating not in (_SOFTMAX, _SIGMOID) or number("expert_group_count", 0):
        return "their experts are chosen in a way that our graph does not know"
    found = {
        "n_embd": number("embedding_length"),
        "n_head": number("attention.head_count"),
        "n_head_kv": number("attention.head_count_kv"),
        "head_dim": key_length,
        "n_expert_used": number("expert_used_count", 0),
        "rms_eps": number("attention.layer_norm_rms_epsilon", kind=float),
        "expert_scale": number("expert_weights_scale", 0.0, float),
    }
    rope = {
        "freq_base": number("rope.freq_base", 10000.0, float),
        "n_dims": number("rope.dimension_count", key_length),
        "original_context": number("context_length"),
    }
    if missing := [name for name, value in (found | rope).items() if value is None]:
        return f"the file does not say their {', '.join(missing)}"
    return HeadLayerSpec(
        layer=layer,
        rope=RopeSpec(**rope),
        is_gated=not is_glm,
        by_sigmoid=gating == _SIGMOID,
        adds_to_one=bool(number("expert_weights_norm", False)) if is_glm else True,
        **found,
    )


def n_heads_of(target: GgufFile) -> int:
    """The number of layers in a target's file that predict further tokens."""
    name = target.architecture
    n = target.optional(f"{name}.nextn_predict_layers", int, 0)
    last = target.require(f"{name}.block_count", int) - 1
    return n if f"blk.{last}.nextn.eh_proj.weight" in target.tensors else 0


def read_spec(file: GgufFile, target: GgufFile) -> FileSpec:
    """The spec of a drafter for `target`, whose vocabulary counts if a DFlash drafter's file has
    none. Raises FileError if it is no drafter, and none that is a language model either."""
    if file.architecture == ASSISTANT:
        return replace(read_assistant(file), target_layers=(_tappable_layers(target),))
    if file.architecture in {"dflash", *OLD_ARCHITECTURES} | NOT_GENERATIVE_ARCHITECTURES:
        return read_drafter(file, n_vocab=target.n_vocab)
    check_target(file)
    name = file.architecture
    if n_heads_of(file) and "blk.0.attn_norm.weight" not in file.tensors:
        file.fail("heads without their model; give a target that has them in its own file, and mtp")
    if name in OWN_STATE_ARCHITECTURES:
        file.fail(f"general.architecture is {name!r}, whose states were not tried in a drafter")
    return ModelSpec(file.n_vocab or 0, name in RECURRENT_ARCHITECTURES)


def read_assistant(file: GgufFile) -> AssistantSpec:
    """The spec of an assistant, without a target. Raises FileError for a bad file."""
    check_model(file, {ASSISTANT})
    keys = ("block_count", "nextn_predict_layers")
    ours, theirs = (file.require(f"{ASSISTANT}.{key}", int) for key in keys)
    if ours != theirs:
        file.fail(f"{keys[1]} is {theirs} and {keys[0]} {ours}, expected the same: all its layers")
    return AssistantSpec(file.n_vocab or 0)


def check_taps(target: GgufFile, layers: Sequence[int]) -> None:
    """Raise InputError unless llama.cpp can tap the inputs of these layers of `target`."""
    if not layers:
        return
    if fault := _taps(target):
        raise PairError(fault)
    n_layer = _tappable_layers(target)
    for layer in layers:
        if not 1 <= layer < n_layer:
            raise InputError(
                f"{target.path}: cannot tap the input of layer {layer}; expected 1 to {n_layer - 1}"
            )


def _faults(target: GgufFile, drafter: GgufFile, spec: FileSpec) -> Iterator[str | None]:
    """The faults of a pair, each with both values and what to do; None for each field that fits."""
    if isinstance(spec, DrafterSpec):
        n_embd = target.require(f"{target.architecture}.embedding_length", int)
        yield _equal(target, drafter, "hidden size", "embedding_length", n_embd, spec.n_embd)
        yield _tapped_layers(target, drafter, spec)
    if isinstance(spec, AssistantSpec):
        yield from _cells(target, drafter)
    yield _sizes(target, drafter, spec)
    if _TOKENS not in drafter.metadata:
        return
    for name, key in (
        ("tokenizer model", "tokenizer.ggml.model"),
        ("pre-tokenizer", "tokenizer.ggml.pre"),
    ):
        ours, theirs = target.get(key), drafter.get(key)
        # files converted before there were pre-tokenizer names have none
        if name == "tokenizer model" or None not in (ours, theirs):
            yield _equal(target, drafter, name, key, ours, theirs)
    yield _tokens(target, drafter)


def _cells(target: GgufFile, drafter: GgufFile) -> Iterator[str | None]:
    """An assistant reads the cells of the target's last two layers, of which the first has a
    window: llama.cpp takes their sizes from the assistant's own file."""
    name = target.architecture
    yield _equal(target, drafter, "architecture", "", name, _ASSISTED)
    if name != _ASSISTED:
        return
    n_embd = target.get(f"{name}.embedding_length")
    n_out = drafter.get(f"{ASSISTANT}.embedding_length_out")
    yield _equal(target, drafter, "hidden size", "embedding_length_out", n_embd, n_out)
    for key in ("key_length", "key_length_swa"):
        name = f"attention.{key}"
        ours, theirs = (file.get(f"{file.architecture}.{name}") for file in (target, drafter))
        yield _equal(target, drafter, key.replace("_", " "), name, ours, theirs)
    windows, last = _of_layers(drafter, _WINDOWS), _of_layers(target, _WINDOWS)[-2:]
    yield _equal(target, drafter, "windows", _WINDOWS, last, [True, False])
    if last != [True, False]:
        return
    ours, theirs = (_of_layers(file, "attention.head_count_kv") for file in (target, drafter))
    read = [ours[-2 if has_window else -1] for has_window in windows]
    yield _equal(target, drafter, "heads of the cells", "attention.head_count_kv", read, theirs)


def _of_layers(file: GgufFile, key: str) -> list[Any]:
    """A key's values for all layers, of which the file may have one for all."""
    n = file.require(f"{file.architecture}.block_count", int)
    value = file.get(f"{file.architecture}.{key}")
    return [*value, *[None] * n][:n] if isinstance(value, list) else [value] * n


def _sizes(target: GgufFile, drafter: GgufFile, spec: FileSpec) -> str | None:
    """The larger models of a family may have some unused tokens more than its small ones."""
    ours, theirs = target.n_vocab or 0, spec.n_vocab
    if isinstance(spec, ModelSpec) and abs(ours - theirs) <= _MOST_UNUSED:
        return None
    return _equal(target, drafter, "vocabulary size", "", ours, theirs)


def _roll_back(target: GgufFile) -> str | None:
    if rolls_back(target.architecture):
        return None
    return (
        f"{target.path}: general.architecture is {target.architecture!r}, which has recurrent "
        f"layers whose state cannot be rolled back here; choose a target without, {_PLAIN}"
    )


def _taps(target: GgufFile) -> str | None:
    if target.architecture in TAPPED_ARCHITECTURES:
        return None
    return (
        f"{target.path}: general.architecture is {target.architecture!r}, whose hidden states "
        "llama.cpp's graph does not give; choose a target of another, such as qwen3, llama, gemma3 "
        f"or gpt-oss, {_PLAIN}"
    )


def _tapped_layers(target: GgufFile, drafter: GgufFile, spec: DrafterSpec) -> str | None:
    n_layer = _tappable_layers(target)
    beyond = [layer for layer in spec.target_layers if layer >= n_layer]
    if not beyond:
        return None
    return (
        f"{drafter.path}: dflash.target_layers {list(spec.target_layers)} taps the input of "
        f"layer {beyond[0]}, and the target {target.path} has the layers 0 to {n_layer - 1}; "
        "use the target that this drafter was trained for"
    )


def _tappable_layers(target: GgufFile) -> int:
    n_layer = target.require(f"{target.architecture}.block_count", int)
    # the last layers, which predict more tokens ahead, are not in the tapped graph
    return n_layer - target.optional(f"{target.architecture}.nextn_predict_layers", int, 0)


def _tokens(target: GgufFile, drafter: GgufFile) -> str | None:
    """The first token that differs. Whether their numbers may differ, `_sizes` says."""
    ours, theirs = target.get(_TOKENS), drafter.get(_TOKENS)
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    index = next((i for i, pair in pairs if pair[0] != pair[1]), None)
    if index is None:
        return None
    return _equal(target, drafter, f"token {index}", "", ours[index], theirs[index])


def _equal(
    target: GgufFile, drafter: GgufFile, name: str, key: str, ours: object, theirs: object
) -> str | None:
    """None if both values are the same. `key` is their key, if they have one."""
    if ours == theirs:
        return None
    where = f"{name} ({key})" if key else name
    return (
        f"{where} is {theirs!r} in the drafter {drafter.path} and {ours!r} in the target "
        f"{target.path}; use the drafter that was trained for this target, {_PLAIN}"
    )
