"""Texts become the tokens that llama.cpp makes of them, in a time that no text can stretch."""

import gc
import random
import threading
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api
import pytest

import gguf_files
import tiny_coder
from dflash_local.errors import ClosedError, ContextFullError
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from dflash_local.target_model.vocabulary import Vocabulary
from vocab_only import vocabulary_of

NAMES = ["<unk>", "<s>", "</s>", "<|a|>", "<|a|><|a|>", "|>~~", "~|", "|~|", "~~<"]
NAMES += ["é|", "\n", " \n "]
USER_DEFINED = 4


def tokens_at_once(vocabulary: Vocabulary, text: str, special: bool, add_special: bool) -> Any:
    """llama.cpp's own answer, in one call."""
    raw, room = text.encode(), len(text.encode()) + 16
    ids = (api.llama_token * room)()
    n = api.llama_tokenize(vocabulary.pointer, raw, len(raw), ids, room, add_special, special)
    return ids[:n]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "edges"), [("plain", (True, True)), ("plain", (False, True)), ("phi-3", (True, False))]
)
def test_a_long_text_has_the_tokens_that_llama_cpp_gives_it_in_one_call(
    pair: tuple[Path, Path], tmp_path: Path, name: str, edges: tuple[bool, bool]
) -> None:
    """Names that overlap, and, as llama.cpp does by the name of the model, swallow blanks."""
    keys, _ = gguf_files.parts(pair[0])
    texts = list(keys["tokenizer.ggml.tokens"][0])
    kinds = list(keys["tokenizer.ggml.token_type"][0])
    merges = keys["tokenizer.ggml.merges"][0][: -len(NAMES)]
    first = texts.index("<|endoftext|>") - len(NAMES)
    for token, text in enumerate(NAMES, first):
        texts[token], kinds[token] = text, USER_DEFINED
    changed = {
        "general.name": (name, gguf_files.STRING, None),
        "tokenizer.ggml.tokens": (texts, gguf_files.ARRAY, gguf_files.STRING),
        "tokenizer.ggml.token_type": (kinds, gguf_files.ARRAY, gguf_files.INT32),
        "tokenizer.ggml.merges": (merges, gguf_files.ARRAY, gguf_files.STRING),
        "tokenizer.ggml.bos_token_id": (first + 1, gguf_files.UINT32, None),
        "tokenizer.ggml.add_bos_token": (edges[0], gguf_files.BOOL, None),
        "tokenizer.ggml.add_eos_token": (edges[1], gguf_files.BOOL, None),
    }
    path = gguf_files.changed(pair[0], tmp_path / "names.gguf", keys=changed)
    draw = random.Random(0)
    parts = [*NAMES, "<|im_start|>", "<|im_", "a", " ", "  ", "def f", "~", "|", "<", ">", "\t"]
    with vocabulary_of(path) as read:
        for n_kinds in [3, 5, len(parts)]:
            chosen = draw.sample(parts, n_kinds)
            text = "".join(draw.choices(chosen, k=5000))
            for special in (True, False):
                for add in (True, False):
                    found = read.tokenize(text, special=special, add_special=add)
                    assert found == tokens_at_once(read, text, special, add), (chosen, special, add)


def test_no_call_has_many_names(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's time grows with their square: in one call it takes 18 s for this text."""
    lengths: list[int] = []
    tokenize = api.llama_tokenize

    def counted(pointer: Any, raw: bytes, *more: Any) -> int:
        lengths.append(raw.count(b"<|im_start|>"))
        return int(tokenize(pointer, raw, *more))

    with vocabulary_of(pair[0]) as read:
        monkeypatch.setattr(api, "llama_tokenize", counted)
        assert len(read.tokenize("<|im_start|>" * 80_000)) == 80_000
    assert sum(lengths) == 80_000 and max(lengths) <= 1024


def test_a_text_that_does_not_fit_is_not_read_to_its_end(pair: tuple[Path, Path]) -> None:
    with vocabulary_of(pair[0]) as read, pytest.raises(ContextFullError, match="at least 50"):
        read.tokenize("<|im_start|>" * 60_000, n_ctx=50_000)


def test_a_text_that_would_take_gigabytes_is_refused(pair: tuple[Path, Path]) -> None:
    """Blanks: 128 of them may be one token, so that a context may hold four megabytes."""
    with vocabulary_of(pair[0]) as read:
        with pytest.raises(ContextFullError, match="at most 1048576 are read"):
            read.tokenize(" " * (4 << 20), n_ctx=40_000)
        assert len(read.tokenize(" " * (1 << 17), n_ctx=2000)) == 4096


def test_a_model_that_is_collected_in_the_midst_of_a_reader() -> None:
    """A finalizer runs on any thread at any point: one that waited for readers would wait for its
    own thread."""
    read: list[str] = []

    def reader() -> None:
        abandoned = Target(tiny_coder.pair()[0], TargetOptions(n_ctx=64, n_threads=1))
        found = abandoned.vocabulary
        with found.reading() as pointer:
            del abandoned
            gc.collect()
            read.append(str(api.llama_vocab_n_tokens(pointer)))
        with pytest.raises(ClosedError):
            found.tokenize("a")
        read.append("closed")

    thread = threading.Thread(target=reader, daemon=True)
    thread.start()
    thread.join(60)
    assert read == ["8192", "closed"]
