"""The tokenizer keys of a drafter's GGUF file: those of its target, so that both agree in every
token."""

from collections.abc import Sequence
from pathlib import Path

from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile

from .files.reading import read_json
from .key import Key

_LIMIT = 1 << 27
"""Bytes of a tokenizer.json."""
_TOKENS = "tokenizer.ggml.tokens"
_MASK = "tokenizer.ggml.mask_token_id"


def tokenizer_keys(target: GgufFile, *, n_vocab: int, mask_token_id: int) -> list[Key]:
    """All `tokenizer.*` keys of `target`, with that of the mask token, for a drafter with `n_vocab`
    tokens.

    Raises FileError if the target has another number of tokens.
    """
    tokens = target.require(_TOKENS, list)
    if len(tokens) != n_vocab:
        target.fail(
            f"holds {len(tokens)} tokens, and the drafter is for a target with {n_vocab}; "
            "give the target that the drafter was trained for"
        )
    copied = [
        Key.copied(target, name)
        for name, value in target.metadata.items()
        # GGUF writers refuse an empty array, which says nothing
        if name.startswith("tokenizer.") and name != _MASK and value != []
    ]
    return [*copied, Key.of(_MASK, mask_token_id)]


def check_own_tokenizer(folder: Path, target: GgufFile) -> None:
    """Raise InputError, naming the first id, where a tokenizer.json in `folder` differs from the
    target's.

    Tokens that were added to the vocabulary are not compared: GGUF files may have them under other
    texts.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    try:
        stated = read_json(path, _LIMIT)
        vocabulary = dict(stated["model"]["vocab"])
        added = {entry["id"] for entry in stated.get("added_tokens") or []}
    except (ValueError, TypeError, LookupError):
        return  # another kind of tokenizer, or none
    tokens: Sequence[str] = target.require(_TOKENS, list)
    ids = sorted((number, text) for text, number in vocabulary.items() if number not in added)
    for number, text in ids:
        other = tokens[number] if number < len(tokens) else None
        if other != text:
            raise InputError(
                f"token {number} is {text!r} in the drafter's {path} and {other!r} in the target"
                f" {target.path}; give the target that the drafter was trained for"
            )
