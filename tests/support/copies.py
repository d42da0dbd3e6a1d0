"""The copies that a sequence's text offers."""

from collections.abc import Sequence

from dflash_local.copies.copier import Copier, Copy


def copies_of(copier: Copier, prompt: Sequence[int], tokens: Sequence[int], n: int) -> list[Copy]:
    """Copies of at most `n` tokens that may follow."""
    finds = copier.finds(prompt, tokens, n)
    copies = copier.offers()
    assert finds == bool(copies)
    return copies
