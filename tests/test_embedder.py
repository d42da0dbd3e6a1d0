"""Vectors and scores of texts are llama.cpp's, and what it would abort on is refused."""

from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_local import (
    ClosedError,
    Embedder,
    FileError,
    InputError,
    PromptTooLongError,
    load_embedder,
)
from dflash_local.embedder import normalized, plan_embedder
from dflash_local.fit.options import POOLINGS, LoadOptions, Pooling
from dflash_local.fit.pairing import pooling_of
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.runtime import Device
from embedding_models import N_CTX, N_EMBD, write_bert, write_decoder, write_rerank_template
from gguf_files import tensors_of

TEXTS = ["Hello world", "the cat sat on the mat", "a " * 300, "what is machine learning?"]
CLOSE = 2e-3
"""Of numbers around one: flash attention has halves inside."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedders")


@pytest.fixture(scope="module")
def bert_file(folder: Path) -> Path:
    return write_bert(folder / "bert.gguf")


@pytest.fixture(scope="module")
def reranker_file(folder: Path) -> Path:
    return write_bert(folder / "reranker.gguf", pooling=4, classifier=True)


@pytest.fixture(scope="module")
def decoder_file(folder: Path, pair: tuple[Path, Path]) -> Path:
    return write_decoder(folder / "decoder.gguf", pair[0])


@pytest.fixture(scope="module")
def bert(bert_file: Path) -> Iterator[Embedder]:
    with load_embedder(bert_file, n_threads=1, n_gpu_layers=0, quiet=True) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def decoder(decoder_file: Path) -> Iterator[Embedder]:
    with load_embedder(decoder_file, n_threads=1, n_gpu_layers=0, quiet=True) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def reranker(reranker_file: Path) -> Iterator[Embedder]:
    with load_embedder(reranker_file, n_threads=1, n_gpu_layers=0, quiet=True) as embedder:
        yield embedder


def of_llama_cpp(path: Path, pooling: Pooling, text: str) -> NDArray[np.float64]:
    """The vector of a text by llama-cpp-python's own class."""
    llm = llama_cpp.Llama(
        str(path),
        embedding=True,
        pooling_type=POOLINGS.index(pooling),
        n_ctx=2048,
        n_batch=2048,
        n_ubatch=2048,
        n_threads=1,
        n_gpu_layers=0,
        flash_attn=True,
        verbose=False,
    )
    try:
        return np.array(llm.embed(text, truncate=False))
    finally:
        llm.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_an_encoder_s_vectors_are_llama_cpp_s(bert_file: Path, pooling: Pooling) -> None:
    with load_embedder(bert_file, pooling=pooling, n_threads=1, quiet=True) as embedder:
        found = embedder.embed(TEXTS, normalize=False)
    assert found.dtype == np.float32 and found.shape == (len(TEXTS), N_EMBD)
    for vector, text in zip(found, TEXTS, strict=True):
        assert np.allclose(vector, of_llama_cpp(bert_file, pooling, text), atol=CLOSE)


@pytest.mark.slow
def test_a_decoder_s_vectors_are_llama_cpp_s(decoder: Embedder, decoder_file: Path) -> None:
    """The last text is longer than what llama.cpp computes at once."""
    texts = ["def add(a, b):", "return the sum", "x = 1\n" * 200]
    assert decoder.pooling == "last" and len(decoder.tokens(texts[2])) > 512
    found = decoder.embed(texts)
    for vector, text in zip(found, texts, strict=True):
        theirs = of_llama_cpp(decoder_file, "last", text)
        assert vector @ theirs / np.linalg.norm(theirs) == pytest.approx(1, abs=CLOSE)


def test_with_pooling_none_each_token_has_a_vector(bert_file: Path, bert: Embedder) -> None:
    with load_embedder(bert_file, pooling="none", n_threads=1, quiet=True) as embedder:
        (rows,) = embedder.run([embedder.tokens(TEXTS[0])])
        assert rows.shape == (4, N_EMBD)
        with pytest.raises(InputError, match="gives no one vector of a text; load it with a pool"):
            embedder.embed(TEXTS)
    assert np.allclose(rows.mean(axis=0), bert.embed(TEXTS[0], normalize=False)[0], atol=CLOSE)


@pytest.mark.slow
def test_many_texts_have_the_vectors_that_each_has_alone(bert: Embedder, decoder: Embedder) -> None:
    texts = [f"{'hello ' * (n % 40)}this is test {n}" for n in range(50)]
    for embedder in (bert, decoder):
        found = embedder.embed(texts)
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
        for n in (0, 1, 41, 49):
            assert found[n] @ embedder.embed(texts[n])[0] == pytest.approx(1, abs=CLOSE)
        assert found[0] @ found[39] < 0.99


def test_a_text_may_be_tokens(bert: Embedder) -> None:
    ids = bert.tokens("hello world")
    inner = ids[1:-1]
    assert (bert.embed(["hello world"]) == bert.embed([ids])).all()
    assert bert.tokens(["hello ", *inner[1:]]) == ids
    assert bert.embed([]).shape == (0, N_EMBD)


def test_scores_are_those_of_the_classifier(reranker: Embedder, reranker_file: Path) -> None:
    query, documents = "what is machine learning", ["a cat", "machine learning is data", ""]
    scores = reranker.rerank(query, documents)
    weights = {
        name: data.astype(np.float64)
        for name, (data, _) in tensors_of(reranker_file).items()
        if name.startswith("cls")
    }
    with load_embedder(reranker_file, pooling="cls", n_threads=1, quiet=True) as embedder:
        for score, document in zip(scores, documents, strict=True):
            (first,) = embedder.run([reranker.pair_tokens(query, document)])
            hidden = np.tanh(weights["cls.weight"] @ first + weights["cls.bias"])
            expected = weights["cls.output.weight"] @ hidden + weights["cls.output.bias"]
            assert score == pytest.approx(expected.item(), abs=2 * CLOSE)
    assert scores.dtype == np.float32 and len(set(scores.tolist())) == 3


def test_a_pair_is_written_as_the_model_wants_it(reranker: Embedder) -> None:
    pair = reranker.pair_tokens("a cat", "the mat")
    pieces = [reranker.vocabulary.name(token).strip() for token in pair]
    assert pieces == ["[CLS]", "a", "cat", "[SEP]", "the", "mat"]


def test_a_reranker_s_template_is_followed_and_texts_stay_texts(
    folder: Path, decoder_file: Path
) -> None:
    path, template = write_rerank_template(folder / "template.gguf", decoder_file)
    with load_embedder(path, pooling="rank", n_threads=1, quiet=True) as embedder:
        vocabulary = embedder.vocabulary
        pair = embedder.pair_tokens("{document}", "x = 1")
        whole = template.format(query="{document}", document="x = 1")
        assert pair == vocabulary.tokenize(whole, add_special=False)
        name = vocabulary.eos
        control = vocabulary.tokenize(name)[0]
        plain = vocabulary.tokenize(template.format(query="q", document="d"), add_special=False)
        marked = embedder.pair_tokens(name, f"{name} no end")
        assert name and marked.count(control) == plain.count(control) == 1
        assert 0 <= embedder.rerank("q", ["d"])[0] <= 1  # a softmax, as of Qwen3's rerankers


def test_a_text_that_is_too_long(bert: Embedder) -> None:
    text = "hello " * 600
    with pytest.raises(PromptTooLongError, match=r"too large: 602 tokens, and bert.gguf .* 512"):
        bert.embed([text])
    cut = bert.tokens(text, truncate=True)
    assert len(cut) == N_CTX and cut[:2] + cut[-1:] == [*bert.tokens("hello")]
    assert (bert.embed([text], truncate=True) == bert.embed([cut])).all()
    with pytest.raises(PromptTooLongError, match="at least"):
        bert.embed(["z" * (1 << 21)])
    assert len(bert.tokens("z" * (1 << 21), truncate=True)) <= N_CTX


def test_a_smaller_context(bert_file: Path) -> None:
    with load_embedder(bert_file, n_ctx=20, n_threads=1, quiet=True) as embedder:
        assert embedder.n_ctx == 20
        assert embedder.embed(["a " * 18] * 3).shape == (3, N_EMBD)
        with pytest.raises(PromptTooLongError):
            embedder.embed(["a " * 19])


def test_what_is_no_text(bert: Embedder, decoder: Embedder) -> None:
    with pytest.raises(InputError, match="the input is empty"):
        decoder.embed([""])
    assert bert.embed([""]).shape == (1, N_EMBD)  # it has a token before a text
    for ids in ([-1], [bert.n_vocab]):
        with pytest.raises(InputError, match="not in the vocabulary"):
            bert.embed([ids])


def test_what_a_model_does_not_make(bert: Embedder, reranker: Embedder) -> None:
    with pytest.raises(InputError, match="gives no scores; give a reranker"):
        bert.rerank("a", ["b"])
    with pytest.raises(InputError, match="gives no vectors; rerank gives its scores"):
        reranker.embed("a")


def test_models_that_are_refused(pair: tuple[Path, Path], bert_file: Path, folder: Path) -> None:
    with pytest.raises(InputError, match=r"writes text, .* pooling='last'"):
        load_embedder(pair[0], quiet=True)
    with pytest.raises(FileError, match="a DFlash drafter"):
        load_embedder(pair[1], pooling="last", quiet=True)
    with pytest.raises(FileError, match=r"no reranker: it has no tensor cls\.weight"):
        load_embedder(bert_file, pooling="rank", quiet=True)
    with pytest.raises(InputError, match="pooling is 'max'; give one of none, mean"):
        load_embedder(bert_file, pooling="max", quiet=True)  # type: ignore[arg-type]
    broken = folder / "broken.gguf"
    broken.write_bytes(bert_file.read_bytes()[:-4096])
    with pytest.raises(FileError, match=r"broken\.gguf"):
        load_embedder(broken, quiet=True)


def test_how_a_file_is_used(
    folder: Path, pair: tuple[Path, Path], bert_file: Path, decoder_file: Path
) -> None:
    assert pooling_of(GgufFile.open(pair[0])) is None
    assert pooling_of(GgufFile.open(bert_file)) == "mean"
    assert pooling_of(GgufFile.open(decoder_file)) == "last"
    plain = write_bert(folder / "plain.gguf", pooling=None)
    assert pooling_of(GgufFile.open(plain)) == "none"
    old = write_bert(folder / "old.gguf", pooling=None, classifier=True)
    assert pooling_of(GgufFile.open(old)) == "rank"


def test_a_machine_that_is_too_small(decoder_file: Path) -> None:
    small = Device("CPU", "a small one", "cpu", free=290 << 20, total=300 << 20)
    with pytest.raises(InputError, match="CPU needs"):
        plan_embedder(GgufFile.open(decoder_file), "last", LoadOptions(n_ctx=4096), [small])


def test_a_closed_model(bert_file: Path) -> None:
    embedder = load_embedder(bert_file, n_threads=1, quiet=True)
    embedder.close()
    embedder.close()
    with pytest.raises(ClosedError):
        embedder.embed("hello")


def test_it_is_counted(bert_file: Path) -> None:
    with load_embedder(bert_file, n_threads=1, quiet=True) as embedder:
        embedder.embed(["hello world", "hello"])
        status = embedder.status()
        assert (status.requests, status.prompt_tokens, status.passes) == (2, 7, 1)
        assert (status.longest, status.n_busy, status.emitted) == (4, 0, 0)


def test_norms_are_llama_cpp_s() -> None:
    vectors = np.array([[3, -4], [0, 0]], np.float32)
    assert (normalized(vectors, -1) == vectors).all()
    assert np.allclose(normalized(vectors), [[0.6, -0.8], [0, 0]])
    assert np.allclose(normalized(vectors, 0), [[24570, -32760], [0, 0]])
    assert np.allclose(normalized(vectors, 1), [[3 / 7, -4 / 7], [0, 0]])
    assert np.allclose(normalized(vectors, 3), np.array([[3, -4], [0, 0]]) / 91 ** (1 / 3))
