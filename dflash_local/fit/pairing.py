"""Do a target and a drafter fit each other? Decided from their headers, before any loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from dflash_local.errors import InputError, PairError
from dflash_local.gguf.drafter_spec import DrafterSpec, RopeSpec, ScaleSpec
from dflash_local.gguf.file import GgufFile

__all__ = [
    "RECURRENT_ARCHITECTURES",
    "TAPPED_ARCHITECTURES",
    "DrafterSpec",
    "RopeSpec",
    "ScaleSpec",
    "check_pair",
    "check_taps",
    "check_target",
]

# Architectures whose graph in llama.cpp's src/models calls the output of each layer `l_out`, keeps
# that name and hands it on, as it is, as the input of the next layer: what is tapped. Names as in
# src/llama-arch.cpp. Not so in others: several streams side by side (gemma3n, hy_v4, deepseek4), a
# norm between loops (nanbeige), layers without an output (deci), another name in the end (step35,
# nemotron_h).
TAPPED_ARCHITECTURES = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "bailingmoe",
        "bailingmoe2",
        "bailingmoe3",
        "chatglm",
        "cohere2",
        "cohere2moe",
        "command-r",
        "dbrx",
        "deepseek",
        "deepseek2",
        "dots1",
        "ernie4_5",
        "ernie4_5-moe",
        "exaone",
        "exaone-moe",
        "exaone4",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "glm4",
        "glm4moe",
        "gpt-oss",
        "granite",
        "granitemoe",
        "grok",
        "hunyuan-dense",
        "hunyuan-moe",
        "hunyuan_vl",
        "internlm2",
        "lfm2",
        "lfm2moe",
        "llama",
        "llama4",
        "mimo2",
        "minicpm",
        "minicpm3",
        "minimax-01",
        "minimax-m2",
        "mistral3",
        "mistral4",
        "muse-glimmer",
        "nemotron",
        "olmo",
        "olmo2",
        "olmoe",
        "phi2",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2moe",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)

# llm_arch_is_recurrent and llm_arch_is_hybrid: their state cannot be rolled back row by row
RECURRENT_ARCHITECTURES = frozenset(
    {
        "arwkv7",
        "bailingmoe3",
        "deepseek4",
        "falcon-h1",
        "glm5-next",
        "granitehybrid",
        "jamba",
        "kimi-k3",
        "kimi-linear",
        "lfm2",
        "lfm2moe",
        "mamba",
        "mamba2",
        "minimax-01",
        "nemotron_h",
        "nemotron_h_moe",
        "plamo2",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "qwen4exp",
        "rwkv6",
        "rwkv6qwen2",
        "rwkv7",
    }
)

# llama.cpp knows these, but they do not write text one token after the other
_NOT_GENERATIVE = frozenset(
    {
        "bert",
        "clip",
        "eagle3",
        "eurobert",
        "gemma-embedding",
        "gemma4-assistant",
        "jina-bert-v2",
        "jina-bert-v3",
        "llama-embed",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "pockettts",
        "qwen3tts",
        "t5",
        "t5encoder",
        "wavtokenizer-dec",
    }
)
_DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_PLAIN = "or leave the drafter out for plain decoding"


def check_target(file: GgufFile) -> None:
    """Raise FileError unless `file` is a language model that may be a target."""
    architecture = file.architecture
    if architecture == "dflash":
        file.fail(
            "a DFlash drafter (general.architecture 'dflash') given as the target; give it as the "
            "draft model, and the model that it was trained for as the target"
        )
    if architecture in _NOT_GENERATIVE | _DIFFUSION:
        file.fail(
            f"general.architecture is {architecture!r}, expected a language model that writes text "
            "from left to right"
        )
    kind = file.optional("general.type", str, "model")
    if kind != "model":
        file.fail(f"general.type is {kind!r}, expected 'model'; give the model itself")
    for key, high in (
        ("block_count", _MAX_LAYERS),
        ("embedding_length", 1 << 31),
        ("context_length", 1 << 31),
    ):
        value = file.require(f"{architecture}.{key}", int)
        if not 1 <= value <= high:
            file.fail(f"{architecture}.{key} is {value}, expected 1 to {high}")
    if not file.require("tokenizer.ggml.tokens", list):
        file.fail("key 'tokenizer.ggml.tokens' is empty, expected the vocabulary")
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        file.fail("tensor token_embd.weight is missing: a vocabulary without a model")
    expected = [file.metadata[f"{architecture}.embedding_length"], file.n_vocab]
    if list(embeddings.shape) != expected:
        file.fail(
            f"tensor token_embd.weight has the shape {list(embeddings.shape)}, expected "
            f"{expected}: embedding_length and the number of tokens"
        )


def check_pair(target: GgufFile, drafter: GgufFile) -> DrafterSpec:
    """The spec of `drafter`, when it fits `target`.

    Raises FileError when one of the two is no target or no drafter by itself, PairError when they
    do not belong together: the message names the field, both values and the remedy.
    """
    check_target(target)
    _check_architecture(target)
    spec = DrafterSpec.read(drafter, n_vocab=target.n_vocab)
    architecture = target.architecture
    n_embd = target.require(f"{architecture}.embedding_length", int)
    if spec.n_embd != n_embd:
        _mismatch(target, drafter, "embedding_length (hidden size)", n_embd, spec.n_embd)
    _check_layers(target, drafter, spec)
    _check_vocabulary(target, drafter, spec)
    return spec


def check_taps(target: GgufFile, layers: Sequence[int]) -> None:
    """Raise InputError unless llama.cpp can tap the inputs of these layers of `target`."""
    if not layers:
        return
    _check_tapped(target)
    n_layer = _tappable_layers(target)
    for layer in layers:
        if not 1 <= layer < n_layer:
            raise InputError(
                f"{target.path}: cannot tap the input of layer {layer}; expected 1 to {n_layer - 1}"
            )


def _check_architecture(target: GgufFile) -> None:
    name = target.architecture
    if name in RECURRENT_ARCHITECTURES:
        raise PairError(
            f"{target.path}: general.architecture is {name!r}, which has recurrent layers whose "
            f"state cannot be rolled back; choose a target without, {_PLAIN}"
        )
    _check_tapped(target)


def _check_tapped(target: GgufFile) -> None:
    name = target.architecture
    if name not in TAPPED_ARCHITECTURES:
        raise PairError(
            f"{target.path}: general.architecture is {name!r}, whose hidden states cannot be had "
            "from llama.cpp's graph; choose a target of another, such as qwen3, llama, gemma3 or "
            f"gpt-oss, {_PLAIN}"
        )


def _check_layers(target: GgufFile, drafter: GgufFile, spec: DrafterSpec) -> None:
    n_layer = _tappable_layers(target)
    beyond = [layer for layer in spec.target_layers if layer >= n_layer]
    if beyond:
        raise PairError(
            f"{drafter.path}: dflash.target_layers {list(spec.target_layers)} taps the input of "
            f"layer {beyond[0]}, and the target {target.path} has the layers 0 to {n_layer - 1}; "
            "use the target that this drafter was trained for"
        )


def _tappable_layers(target: GgufFile) -> int:
    n_layer = target.require(f"{target.architecture}.block_count", int)
    # trailing layers that predict further tokens are no layers of the graph that is tapped
    return n_layer - target.optional(f"{target.architecture}.nextn_predict_layers", int, 0)


def _check_vocabulary(target: GgufFile, drafter: GgufFile, spec: DrafterSpec) -> None:
    if spec.n_vocab != target.n_vocab:
        _mismatch(target, drafter, "vocabulary size", target.n_vocab, spec.n_vocab)
    if "tokenizer.ggml.tokens" not in drafter.metadata:
        return
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"):
        ours, theirs = target.get(key), drafter.get(key)
        # files converted before there were pre-tokenizer names have none
        if ours != theirs and not (key.endswith("pre") and None in (ours, theirs)):
            _mismatch(target, drafter, key, ours, theirs)
    ours, theirs = target.get("tokenizer.ggml.tokens"), drafter.get("tokenizer.ggml.tokens")
    if ours != theirs:
        index = next(
            i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1
        )
        _mismatch(target, drafter, f"token {index}", ours[index], theirs[index])


def _mismatch(
    target: GgufFile, drafter: GgufFile, name: str, ours: object, theirs: object
) -> NoReturn:
    raise PairError(
        f"{name} is {theirs!r} in the drafter {drafter.path} and {ours!r} in the target "
        f"{target.path}; use the drafter that was trained for this target, {_PLAIN}"
    )
