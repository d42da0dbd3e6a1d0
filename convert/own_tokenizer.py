"""The tokenizer that a drafter's folder brings along, against the one of its target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_local.errors import InputError

from .key import Key
from .safetensors_header import read_limited, strict_json

_NAME = "tokenizer.json"
_LIMIT = 1 << 27  # bytes
_TOKENS = "tokenizer.ggml.tokens"


def check_own_tokenizer(folder: Path, keys: Sequence[Key], target: str) -> None:
    """Raise InputError, naming the first id, where a tokenizer.json in `folder` differs from the
    target's `keys`.

    Of tokens that were added to the vocabulary nothing is said: GGUF files may have them under
    other texts.
    """
    path = folder / _NAME
    if not path.is_file():
        return
    try:
        stated = strict_json(read_limited(path, _LIMIT))
        vocabulary = dict(stated["model"]["vocab"])
        added = {entry["id"] for entry in stated.get("added_tokens") or []}
    except (ValueError, TypeError, KeyError, LookupError):
        return  # another kind of tokenizer, or none
    tokens = next(key.value for key in keys if key.name == _TOKENS)
    assert isinstance(tokens, Sequence)
    ids = sorted((number, text) for text, number in vocabulary.items() if number not in added)
    for number, text in ids:
        other = tokens[number] if number < len(tokens) else None
        if other != text:
            raise InputError(
                f"token {number} is {text!r} in the drafter's {path} and {other!r} in the target"
                f" {target}; give the target that the drafter was trained for"
            )
