"""The vocabulary of a file, without its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp.llama_cpp as api

from dflash_local.llama import runtime
from dflash_local.target_model.vocabulary import Vocabulary


@contextmanager
def vocabulary_of(path: Path) -> Iterator[Vocabulary]:
    runtime.init()
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(path).encode(), params)
    assert model, runtime.first_error_line()
    found = Vocabulary(api.llama_model_get_vocab(model))
    try:
        yield found
    finally:
        found.close()
        api.llama_model_free(model)
