"""Finds faults that llama.cpp's vocabulary loader (`src/llama-vocab.cpp`) aborts on or refuses."""

from typing import Any

_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_LISTS = {
    "tokenizer.ggml.token_type": ("int32",),
    "tokenizer.ggml.scores": ("float32", "int32"),
    _MERGES: ("string",),
}
_NO_VOCABULARY = ("no_vocab", "none")
_MERGE_MODELS = ("gpt2", "hybriddna", "whitespace", "gemma4")
# models without a begin-of-text token unless the file names one
_NO_DEFAULT_BOS = ("gemma4", "t5", "rwkv", "test")


def vocabulary_fault(metadata: dict[str, Any], value_types: dict[str, str]) -> str | None:
    """The fault of the tokenizer keys, or None. A file without tokens is all right."""
    model = metadata.get("tokenizer.ggml.model")
    if _TOKENS not in metadata or model in _NO_VOCABULARY:
        return None
    if not isinstance(model, str):
        found = value_types.get("tokenizer.ggml.model", "missing")
        return f"key 'tokenizer.ggml.model' is {found}, expected string"
    if value_types[_TOKENS] != "array of string":
        return f"key '{_TOKENS}' is {value_types[_TOKENS]}, expected array of string"
    tokens: list[str] = metadata[_TOKENS]
    if not tokens:
        return f"key '{_TOKENS}' is empty"
    if fault := _duplicate(tokens):
        return fault
    for key, kinds in _LISTS.items():
        if key not in metadata:
            continue
        if value_types[key] not in [f"array of {kind}" for kind in kinds]:
            return f"key '{key}' is {value_types[key]}, expected array of {' or '.join(kinds)}"
        if key != _MERGES and len(metadata[key]) < len(tokens):
            return f"key '{key}' has {len(metadata[key])} values for {len(tokens)} tokens"
    needs_merges = model in _MERGE_MODELS and metadata.get("tokenizer.ggml.pre") != "kimi-k2"
    if needs_merges and _MERGES not in metadata:
        return f"key '{_MERGES}' is missing, which a tokenizer of model '{model}' needs"
    return _missing_bos(model, metadata, len(tokens))


def _duplicate(tokens: list[str]) -> str | None:
    if len(set(tokens)) == len(tokens):
        return None
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        # llama.cpp gives empty tokens a name of their own
        name = token or f"[EMPTY_{index}]"
        if name in ids:
            return f"token {token!r} has two ids, {ids[name]} and {index}, in key '{_TOKENS}'"
        ids[name] = index
    return None


def _missing_bos(model: str, metadata: dict[str, Any], n_tokens: int) -> str | None:
    wanted = model == "gemma4" or metadata.get("tokenizer.ggml.add_bos_token") is True
    given = metadata.get("tokenizer.ggml.bos_token_id")
    usable = isinstance(given, int) and not isinstance(given, bool) and 0 <= given < n_tokens
    if wanted and model in _NO_DEFAULT_BOS and not usable:
        return (
            f"key 'tokenizer.ggml.bos_token_id' is {given}, expected 0 to {n_tokens - 1}, "
            "since the tokenizer begins every text with it"
        )
    return None
