"""A model that is loaded again finds on disk what the one before it had, however that one ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tiny_coder
from dflash_local import Model, load
from dflash_local.draft.shape import DraftShape
from dflash_local.prefixes.files import PrefixFiles, StoredPrefix
from dflash_local.prefixes.prefix import SavedSequence
from long_text import PYTHON_SOURCE
from shapes import SHAPES, assert_as_well_drafted, exact_model

N = 12
OPTIONS = {"n_ctx": 512, "kv_type": "q8_0", "n_gpu_layers": 0, "n_threads": 1, "quiet": True}

SPILLER = """
from dflash_local import load
model = load(*{pair!r}, **{options!r}, cache_mb=1, cache_dir={folder!r})
while True:
    for prompt in {prompts!r}:
        model.generate(prompt, max_tokens=2, draft_width=8)
"""


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    text = model.tokenize(PYTHON_SOURCE)
    return [text[100 * i : 100 * i + 130] for i in range(6)]


def test_a_slot_that_was_put_back_is_not_the_first_to_go(
    prompts: list[list[int]], tmp_path: Path
) -> None:
    options = {"max_tokens": 2, "draft_width": 0}
    with exact_model("chain", n_seq=2, slot_save_path=tmp_path) as model:
        for slot in range(2):
            model.generate(prompts[slot], id_slot=slot, **options)
        model.save_slot(0, "kept")
        model.erase_slot(0)
        model.restore_slot(0, "kept")
        model.generate(prompts[2], **options)
        found = model.generate(prompts[0], **options)
    assert found.stats.cached_tokens == len(prompts[0]) - 1


def test_others_go_on_while_a_prefix_is_read(
    prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"n_ctx": 1024, "cache_mb": 8, "cache_dir": tmp_path}
    with exact_model("chain", **kept) as first:
        first.generate(prompts[0], max_tokens=2)
    begun, may_end, in_time = threading.Event(), threading.Event(), []

    def slowly(files: PrefixFiles, prefix: StoredPrefix) -> SavedSequence | None:
        begun.set()
        in_time.append(may_end.wait(20))
        return read(files, prefix)

    read = PrefixFiles.read
    monkeypatch.setattr(PrefixFiles, "read", slowly)
    with exact_model("chain", n_seq=2, **kept) as second, ThreadPoolExecutor() as pool:
        other = second.stream(prompts[1], max_tokens=None, ignore_eos=True)
        next(other)
        answer = pool.submit(second.generate, prompts[0], max_tokens=2)
        assert begun.wait(60)
        for _ in range(20):
            next(other)
        may_end.set()
        assert answer.result().stats.cached_tokens == len(prompts[0]) - 1
        other.close()
    assert in_time == [True]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chat_goes_on_after_a_restart(
    prompts: list[list[int]], shape: DraftShape, tmp_path: Path
) -> None:
    options = {"max_tokens": N, "draft_width": 8, "temperature": 0.7, "seed": 5}
    options |= {"presence_penalty": 0.5, "repeat_penalty": 1.2}
    kept = {"n_ctx": 512, "cache_mb": 8, "cache_dir": tmp_path}
    with exact_model(shape, **kept) as first:
        expected = first.generate(prompts[0], **options)
    with exact_model(shape, **kept) as second:
        found = second.generate(prompts[0], **options)
        assert found.stats.cached_tokens == len(prompts[0]) - 1
        assert found.tokens == expected.tokens
        assert_as_well_drafted(found.stats, expected.stats)
        assert second.status().cache_hits == 1
        second.forget()
        assert second.generate(prompts[0], **options).stats.cached_tokens == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGKILL")
def test_killed_while_it_spills(
    chain_model: Model, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny pair, of which a cache of a MiB does not hold two prompts."""
    model, pair = chain_model, tiny_coder.pair()
    options = {"max_tokens": N, "draft_width": 8}
    files = [str(path) for path in pair]
    code = SPILLER.format(pair=files, options=OPTIONS, folder=str(tmp_path), prompts=prompts)
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*.prefix")) or not list(tmp_path.glob("*.tmp")):
            assert process.poll() is None and time.monotonic() < deadline
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    # With room for all: what is asked first would push out what was kept of the last.
    with load(*pair, **OPTIONS, cache_mb=16, cache_dir=tmp_path) as after:
        for each in (model, after):  # each has learnt other things of copies
            monkeypatch.setattr(each.engine, "copies", None)
        for prompt in prompts:
            model.forget()
            expected = model.generate(prompt, **options)
            found = after.generate(prompt, **options)
            assert found.tokens == expected.tokens
            assert found.stats.accepted_lengths == expected.stats.accepted_lengths
        n_hits = after.status().cache_hits
    assert n_hits
