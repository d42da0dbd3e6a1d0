"""The tiny target's vocabulary, loaded once."""

from collections.abc import Iterator

import pytest

import tiny_coder
from dflash_local.sampling.grammar import Grammars
from dflash_local.target_model.vocabulary import Vocabulary
from vocab_only import vocabulary_of


@pytest.fixture(scope="session")
def vocabulary() -> Iterator[Vocabulary]:
    with vocabulary_of(tiny_coder.pair()[0]) as found:
        yield found


@pytest.fixture(scope="session")
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(vocabulary)
