"""Heads in a file of their own, which attend to the target's cells: answers are those of plain
decoding, and drafts those that llama.cpp makes with the same files."""

from pathlib import Path

import pytest

import tiny_coder
from dflash_local import load
from dflash_local.engine.engine import Engine
from dflash_local.errors import FileError, PairError
from dflash_local.fit.pairing import check_pair, check_target
from dflash_local.gguf.file import GgufFile
from dflash_local.pair import open_pair
from dflash_local.target_model.taps import StoredFeatures
from gguf_files import ARRAY, BOOL, INT32, UINT32, Tensor, Value, changed, edited
from heads import (
    Files,
    N,
    assistant_drafter,
    assistant_of,
    drafts,
    read,
    target_of_assistant,
)
from pair_engine import answer
from plain_answer import PlainAnswer, asked_at_once

WAYS = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 5, "repeat_penalty": 1.1}}
KEY = "gemma4-assistant."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("assistants"))


@pytest.fixture(scope="module")
def right(files: Files) -> tuple[Path, Path]:
    """A target, and an assistant that is always right."""
    path = files["an assistant, always right"]
    assistant = assistant_of(path)
    assert assistant
    return path, assistant


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
def test_exact_answers_at_once(files: Files, way: str) -> None:
    """Each sequence has a stream of cells of its own. The one in the middle ends first."""
    path = files["an assistant, sometimes right"]
    assistant = assistant_of(path)
    assert assistant
    with target_of_assistant(path, assistant, n_seq=3, exact=True) as target:
        texts = zip(tiny_coder.prompts()["code"], (N, 8, N), strict=False)
        known = [PlainAnswer(target, text, n, **WAYS[way]) for text, n in texts]
        engine = Engine(target, assistant_drafter(target, assistant), 3)
        for found in asked_at_once(engine, known, (7, 7, 7)):
            assert found.stats.drafted > 0


def test_without_a_free_cell_nothing_is_drafted(right: tuple[Path, Path]) -> None:
    """Texts of other slots fill the cache. Then a draft is empty, and the next one is not."""
    path, assistant = right
    with target_of_assistant(path, assistant, n_seq=2, n_ctx=256) as target:
        drafter = assistant_drafter(target, assistant)
        features = read(Engine(target, drafter, 2), list(range(1000, 1050)))
        expected = drafts(drafter, 300, features)
        assert len(expected) == 6
        for begin in range(0, 256 - 50, 64):
            n = min(64, 256 - 50 - begin)
            target.decode(range(n), range(begin, begin + n), [1] * n, [False] * n)
        none = StoredFeatures(target, [])
        assert drafts(drafter, 300, none) == []
        target.truncate(1, 100)
        assert drafts(drafter, 300, none) == expected


def test_a_full_cache_is_emptied_for_an_answer(right: tuple[Path, Path]) -> None:
    path, assistant = right
    with target_of_assistant(path, assistant, n_seq=2, n_ctx=256) as target:
        known = [PlainAnswer(target, list(range(t, t + 110)), N) for t in (1000, 3000, 5000)]
        engine = Engine(target, assistant_drafter(target, assistant), 2)
        for plain in (*known, *known):
            found = answer(engine, plain.prompt, 7, N)
            assert found.error is None and found.stats.warning is None
            assert found.tokens == plain.tokens
            assert found.stats.accepted > 0


OPTIONS = {"n_ctx": 256, "n_threads": 1, "kv_type": "q8_0", "n_seq": 2}


def test_its_place(right: tuple[Path, Path]) -> None:
    path, assistant = (GgufFile.open(file) for file in right)
    with pytest.raises(FileError, match="a Gemma 4 assistant given as the target; give it as"):
        check_target(assistant)
    with pytest.raises(PairError, match=r"architecture is 'gemma4' .* and 'qwen3' in the target"):
        open_pair(tiny_coder.pair()[0], right[1])
    assert check_pair(path, assistant).target_layers == (6,)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("embedding_length_out", (32, UINT32, None), "embedding_length_out"),
        ("attention.key_length", (32, UINT32, None), "attention.key_length"),
        ("attention.key_length_swa", (64, UINT32, None), "attention.key_length_swa"),
        ("attention.head_count_kv", ([1, 2], ARRAY, INT32), "attention.head_count_kv"),
        ("nextn_predict_layers", (1, UINT32, None), "nextn_predict_layers is 1"),
        ("gemma4.attention.sliding_window_pattern", ([True] * 6, ARRAY, BOOL), "windows"),
    ],
)
def test_one_that_does_not_fit(
    right: tuple[Path, Path], key: str, value: Value, fault: str
) -> None:
    """By a key of the assistant's, or of the target's: then its last layers have other windows."""
    of_target = key.startswith("gemma4.")
    path, assistant = (GgufFile.open(file) for file in right)
    other = edited(path if of_target else assistant, keys={key if of_target else KEY + key: value})
    with pytest.raises((PairError, FileError), match=fault) as caught:
        check_pair(other if of_target else path, assistant if of_target else other)
    assert str(caught.value).count("\n") == 0


def test_one_that_llama_cpp_does_not_load(right: tuple[Path, Path], tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["blk.1.attn_output.weight"]

    path, assistant = right
    spoilt = changed(assistant, tmp_path / "spoilt.gguf", tensors=spoil)
    with pytest.raises(FileError, match=r"spoilt.gguf: llama.cpp cannot draft with it for") as told:
        load(path, spoilt, quiet=True, **OPTIONS)
    assert str(told.value).count("\n") == 0
