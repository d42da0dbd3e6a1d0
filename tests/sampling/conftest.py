"""The shipped target's vocabulary, loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp.llama_cpp as api
import pytest

from dflash_local.demo import pair
from dflash_local.llama import runtime
from dflash_local.sampling.grammar import Grammars
from dflash_local.target.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Iterator[Vocabulary]:
    runtime.init()
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(pair()[0]).encode(), params)
    vocabulary = Vocabulary(api.llama_model_get_vocab(model))
    yield vocabulary
    vocabulary.close()
    api.llama_model_free(model)


@pytest.fixture(scope="session")
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(vocabulary)
