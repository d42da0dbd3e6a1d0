"""The tokenizer of a target, by the model family that its config names.

A text is split by a pattern before its parts are merged to tokens. GGUF stores a name of the
pattern (`tokenizer.ggml.pre`), HF files the pattern itself. Names and patterns are those of
`src/llama-vocab.cpp`, the roles of special tokens those of llama.cpp's converter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_local.errors import FileError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _by_letters(letters: str, others: str, digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s{others}]+[\r\n]*|{_SPACES}"
    )


_QWEN2 = _by_letters(r"\p{L}", r"\p{L}\p{N}", r"\p{N}")
_QWEN35 = _by_letters(r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}", r"\p{N}")
_LLAMA3 = _by_letters(r"\p{L}", r"\p{L}\p{N}", r"\p{N}{1,3}")
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True)
class TokenizerFamily:
    """The form in which the tokenizers of a family of models are stored."""

    layout: Literal["bpe", "ranks", "gemma4"]
    """tokenizer.json over bytes; tiktoken.model; tokenizer.json over characters."""
    pre: str = ""
    pattern: str = ""
    """The pattern that `pre` names; empty if tokenizer.json has none."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Tokens for the roles (`bos`, `eot`, ...) that the files leave open."""


_GLM_ROLES = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}

_QWEN2_FAMILY = TokenizerFamily("bpe", "qwen2", _QWEN2)
_QWEN35_FAMILY = TokenizerFamily("bpe", "qwen35", _QWEN35)
_GLM4_FAMILY = TokenizerFamily("bpe", "glm4", _LLAMA3, _GLM_ROLES)
_KIMI_FAMILY = TokenizerFamily("ranks", "kimi-k2")
_GEMMA4_FAMILY = TokenizerFamily("gemma4")

# by `model_type` of config.json
FAMILIES: dict[str, TokenizerFamily] = {
    "qwen2": _QWEN2_FAMILY,
    "qwen3": _QWEN2_FAMILY,
    "qwen3_moe": _QWEN2_FAMILY,
    "qwen3_next": _QWEN2_FAMILY,
    "qwen3_5": _QWEN35_FAMILY,
    "qwen3_5_text": _QWEN35_FAMILY,
    "qwen3_5_moe": _QWEN35_FAMILY,
    "qwen3_5_moe_text": _QWEN35_FAMILY,
    "llama": TokenizerFamily("bpe", "llama-bpe", _LLAMA3),
    "gpt_oss": TokenizerFamily("bpe", "gpt-4o", _GPT_4O),
    "glm4_moe": _GLM4_FAMILY,
    "glm4_moe_lite": _GLM4_FAMILY,
    "kimi_k2": _KIMI_FAMILY,
    "kimi_k25": _KIMI_FAMILY,
    "gemma4": _GEMMA4_FAMILY,
    "gemma4_text": _GEMMA4_FAMILY,
    "gemma4_unified": _GEMMA4_FAMILY,
    "gemma4_unified_text": _GEMMA4_FAMILY,
}

_INSTEAD = "give the target as a GGUF file, whose tokenizer is copied"


def family_of(config: Mapping[str, Any], where: str) -> TokenizerFamily:
    """The family of a target by its config.json, at `where`. Raises FileError if it is unknown."""
    text_config = config.get("text_config")
    names = [config.get("model_type")]
    if isinstance(text_config, dict):
        names.append(text_config.get("model_type"))
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise FileError(
        f"{where}: the tokenizer of model_type {names[0]!r} is not known, expected one of "
        f"{', '.join(sorted(FAMILIES))}; {_INSTEAD}"
    )


def check_pattern(family: TokenizerFamily, pre_tokenizer: object, where: str) -> None:
    """Raise FileError if a tokenizer.json, at `where`, does not split texts as its family does."""
    if not family.pattern:
        return
    patterns = _patterns(pre_tokenizer)
    if patterns != [family.pattern]:
        found = " and ".join(map(repr, patterns)) or "no pattern"
        raise FileError(
            f"{where}: the pre_tokenizer splits by {found}, expected that of llama.cpp's "
            f"'{family.pre}', {family.pattern!r}; {_INSTEAD}"
        )


def _patterns(node: object) -> list[object]:
    if not isinstance(node, dict):
        return []
    if node.get("type") == "Split":
        pattern = node.get("pattern")
        return [pattern.get("Regex", pattern) if isinstance(pattern, dict) else pattern]
    parts = node.get("pretokenizers")
    return [found for part in parts for found in _patterns(part)] if isinstance(parts, list) else []
