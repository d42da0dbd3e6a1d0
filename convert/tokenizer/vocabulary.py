"""The tokenizer keys of a drafter's GGUF file: those of its target.

Those of a GGUF target are copied. From Hugging Face files they are made as in llama.cpp's converter
(`conversion/base.py`), so that drafter and target agree in every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile

from ..files.reading import read_json
from ..key import Key
from .hf_vocabulary import TOKENIZER_LIMIT, read_vocabulary

if TYPE_CHECKING:
    from ..files.source import Source

_PREFIX = "tokenizer."
_TOKENS = "tokenizer.ggml.tokens"
_MASK = "tokenizer.ggml.mask_token_id"


def tokenizer_keys(target: GgufFile | Source, *, n_vocab: int, mask_token_id: int) -> list[Key]:
    """All `tokenizer.*` keys for a drafter of `target`, with that of the mask token.

    `n_vocab`: the drafter's number of tokens; a vocabulary from HF files is filled up to it. Raises
    InputError if a GGUF target has another number of tokens, or if the mask token is not one of
    them, and FileError if the files cannot be read or are of an unknown family.
    """
    if not 0 <= mask_token_id < n_vocab:
        raise InputError(
            f"the mask token has id {mask_token_id}, and the vocabulary ends at {n_vocab - 1}: "
            "the drafter's config.json contradicts itself"
        )
    if isinstance(target, GgufFile):
        keys = _copied(target, n_vocab)
    else:
        keys = read_vocabulary(target.folder, n_vocab)
    return [*(key for key in keys if key.name != _MASK), Key.of(_MASK, mask_token_id)]


def _copied(target: GgufFile, n_vocab: int) -> list[Key]:
    tokens = target.require(_TOKENS, list)
    if len(tokens) != n_vocab:
        target.fail(
            f"holds {len(tokens)} tokens, and the drafter is for a target with {n_vocab}; "
            "give the target that the drafter was trained for"
        )
    return [
        Key.copied(target, name)
        for name, value in target.metadata.items()
        # GGUF writers refuse an empty array, which says nothing
        if name.startswith(_PREFIX) and value != []
    ]


def check_own_tokenizer(folder: Path, keys: Sequence[Key], target: str) -> None:
    """Raise InputError, naming the first id, where a tokenizer.json in `folder` differs from the
    target's `keys`.

    Tokens that were added to the vocabulary are not compared: GGUF files may have them under other
    texts.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    try:
        stated = read_json(path, TOKENIZER_LIMIT)
        vocabulary = dict(stated["model"]["vocab"])
        added = {entry["id"] for entry in stated.get("added_tokens") or []}
    except (ValueError, TypeError, LookupError):
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
