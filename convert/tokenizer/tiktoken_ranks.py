"""Vocabularies that are stored as ranks of byte strings (`tiktoken.model`), without merges.

The merges are made from the ranks as in llama.cpp's converter (`QwenModel.bpe` of
`conversion/qwen.py`, `set_vocab` of `conversion/deepseek.py`).
"""

import base64
import binascii
from pathlib import Path

from gguf.vocab import bytes_to_unicode

from dflash_local.errors import FileError

from ..files.reading import read_limited

_LIMIT = 1 << 26  # bytes; Kimi's has 3 MB


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token to id, from lines of a base64 token and its rank. Raises FileError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_limited(path, _LIMIT).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise FileError(
                f"{path}: line {number} is {line[:40]!r}, expected a base64 token and its rank"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise FileError(f"{path}: the ranks do not count from 0 to {max(len(ranks) - 1, 0)}")
    return ranks


def as_text(token: bytes) -> str:
    """A byte string in the alphabet of byte-level vocabularies."""
    letters = bytes_to_unicode()
    return "".join(letters[byte] for byte in token)


def merges(ranks: dict[bytes, int]) -> list[str]:
    """The pair of tokens that each longer token is merged from, in the order of the ranks."""
    letters = bytes_to_unicode()
    found = []
    for token, rank in ranks.items():
        if len(token) > 1:
            parts = _split(ranks, token, rank)
            if len(parts) == 2:
                found.append(" ".join("".join(letters[byte] for byte in part) for part in parts))
    return found


def _split(ranks: dict[bytes, int], token: bytes, rank: int) -> list[bytes]:
    """`token` as byte pair encoding has it just before the merge of `rank`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        pairs = ((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
        best, index = min(pairs)
        if best >= rank:
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts
