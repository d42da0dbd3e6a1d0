"""The file of a model that makes vectors or scores of texts, and writes none."""

from dflash_local.errors import InputError
from dflash_local.fit.architectures import EMBEDDING_ARCHITECTURES, RECURRENT_ARCHITECTURES
from dflash_local.fit.options import POOLINGS, Pooling
from dflash_local.fit.pairing import check_model
from dflash_local.gguf.file import GgufFile


def pooling_of(file: GgufFile) -> Pooling | None:
    """The pooling that a model's file asks for; None for one that writes text."""
    given = file.get(f"{file.architecture}.pooling_type")
    if type(given) is int and 0 < given < len(POOLINGS):
        return POOLINGS[given]
    if file.architecture not in EMBEDDING_ARCHITECTURES:
        return None
    return "rank" if _has_classifier(file) else "none"


def check_embedder(file: GgufFile, pooling: Pooling) -> None:
    """Raise FileError unless `file` is a model that can be used with `pooling`, InputError for one
    of another name."""
    if pooling not in POOLINGS:
        raise InputError(f"pooling is {pooling!r}; give one of {', '.join(POOLINGS)}")
    check_model(file, takes=EMBEDDING_ARCHITECTURES)
    if file.architecture in RECURRENT_ARCHITECTURES:
        file.fail("a model with recurrent layers, of which no embeddings are made here")
    if pooling == "rank" and not _has_classifier(file):
        file.fail("no reranker: it has no tensor cls.weight or cls.output.weight")


def _has_classifier(file: GgufFile) -> bool:
    return not {"cls.weight", "cls.output.weight"}.isdisjoint(file.tensors)
