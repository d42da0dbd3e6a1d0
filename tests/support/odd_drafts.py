"""Drafts of any form, and what they say."""

from hypothesis import strategies as st

from dflash_local.draft.draft import ANCHOR, Draft


@st.composite
def trees(draw: st.DrawFn, first: int, last: int) -> Draft:
    """Up to 14 tokens from `first` to `last`, each after any one before it."""
    tokens = draw(st.lists(st.integers(first, last), max_size=14))
    return Draft(tokens, [draw(st.integers(ANCHOR, node - 1)) for node in range(len(tokens))])


def texts(draft: Draft) -> list[tuple[int, ...]]:
    """Of each node, the tokens from the anchor to it."""
    return [tuple(draft.tokens[step] for step in draft.path(node)) for node in range(len(draft))]
