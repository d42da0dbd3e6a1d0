"""Several exact answers at once: each is what it is alone, in a context of one sequence.

With q8_0 weights and cache a row on the CPU rounds alike in every pass, so these tests see whose
cells, chunks and passes an answer has. What a GPU rounds is in tests/cuda/test_gpu.py.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
import mini_pair
import tiny_coder
from adversarial import ScriptedDrafter
from dflash_local import load
from dflash_local.draft.draft import Draft
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.errors import InputError
from dflash_local.prefixes.store import PrefixStore
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.target import Target
from long_text import PYTHON_SOURCE
from neighbours import Drift, among_others, by_itself, requests
from pair_engine import fused_drafter, open_target, request
from windowed import write_windowed

N_SEQ, N_CTX, N_BATCH = 4, 512, 64
N = 12


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with open_target(n_ctx=N_SEQ * N_CTX, n_seq=N_SEQ, n_batch=N_BATCH, exact=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def crowded(target: Target) -> Engine:
    return Engine(target, fused_drafter(target), N_SEQ, store=PrefixStore(1 << 24), exact=True)


@pytest.fixture(scope="module")
def lonely() -> Iterator[Engine]:
    with open_target(n_ctx=N_CTX, n_batch=N_BATCH, exact=True) as opened:
        yield Engine(opened, None, exact=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("width", "params"),
    [(8, {}), (0, {}), (0, {"temperature": 0.8, "logprobs": None}), (16, {"temperature": 0.8})],
    ids=str,
)
def test_answers_are_those_of_one_slot(
    crowded: Engine, lonely: Engine, width: int, params: dict[str, Any]
) -> None:
    """Greedy and seeded, with clients who leave, beginnings that several share, second turns."""
    firsts = requests(crowded, N, width, **params)
    expected = [by_itself(lonely, each) for each in requests(lonely, N, 0, **params)]
    for each, answered in list(zip(firsts, expected, strict=True))[: N // 2]:
        text = [*each.prompt, *answered.tokens, *firsts[0].prompt[:9]]
        firsts.append(request(text, width, 16, seed=1, **({"logprobs": 1} | params)))
        again = request(text, 0, 16, seed=1, **({"logprobs": 1} | params))
        expected.append(by_itself(lonely, again))
    leaving = range(0, len(firsts), 5)
    n_before, n_passes = crowded.slots.n_in_passes, crowded.slots.n_passes
    found, drift = among_others(crowded, firsts, N_SEQ, leaving), Drift()
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if i in leaving:
            assert ours.tokens == theirs.tokens[: len(ours.tokens)]
        else:
            drift.add(ours, theirs)
    assert drift == Drift(drift.n)
    n_passes = crowded.slots.n_passes - n_passes
    assert crowded.slots.n_in_passes - n_before > 1.2 * n_passes
    assert all(sequence.stats.cached_tokens % N_BATCH == 0 for sequence in found)
    assert width == 0 or sum(sequence.stats.drafted for sequence in found) > 0
    assert crowded.prefix_cache.reused["shared"] > 0


def test_bad_drafts_beside_good_ones_change_nothing(
    target: Target, crowded: Engine, lonely: Engine
) -> None:
    crowded.slots.forget_all()  # another engine gets its cells
    known = [by_itself(lonely, each) for each in requests(lonely, 8, 0)]
    texts = [[*sequence.request.prompt, *sequence.tokens] for sequence in known]
    drawn = random.Random(7)

    def script(at: int, anchor: int, n: int) -> Draft:
        """Right for a while, if its text is the one drawn."""
        text, right = drawn.choice(texts), drawn.randrange(n + 1)
        wrong = [drawn.randrange(target.n_vocab) for _ in range(n)]
        if at < len(text) and text[at] == anchor:
            wrong[:right] = text[at + 1 : at + 1 + right]
        return Draft.chain(wrong[: drawn.randrange(1, n + 1)])

    engine = Engine(target, ScriptedDrafter(script, n_seq=N_SEQ), N_SEQ, exact=True)
    engine.slots.forget_all()
    drift = Drift()
    wanted = requests(engine, 8, 16)
    for ours, theirs in zip(among_others(engine, wanted, N_SEQ), known, strict=True):
        drift.add(ours, theirs)
    engine.slots.forget_all()
    assert drift == Drift(8)


@pytest.mark.slow
def test_each_slot_has_its_own_part_of_the_context(crowded: Engine, lonely: Engine) -> None:
    """An answer ends where its own part is full, whatever the others have."""
    crowded.slots.forget_all()  # another engine has used the target
    source = crowded.target.vocabulary.tokenize(PYTHON_SOURCE)
    assert crowded.target.n_ctx == N_CTX

    def asked(width: int) -> list[Request]:
        return [request(source[:n], width, None, logit_bias={2: -100.0}) for n in (500, 505, 60, 9)]

    expected = [by_itself(lonely, each) for each in asked(0)[:2]]
    found = among_others(crowded, [*asked(8)[:2], *(request(source[:9], 8, 30),) * 2], N_SEQ)
    for ours, theirs in zip(found, expected, strict=False):
        assert ours.tokens == theirs.tokens
        assert ours.finish_reason == theirs.finish_reason


def test_no_row_of_a_running_answer_is_shared(crowded: Engine) -> None:
    """It was computed in another pass than a prompt's rows are."""
    crowded.slots.forget_all()
    prompt = crowded.target.vocabulary.tokenize(PYTHON_SOURCE)[:70]
    first = crowded.begin(request(prompt, 8, 150))
    while len(first.tokens) < 100 and first.finish_reason is None:
        crowded.step([first])
    second = crowded.begin(request([*prompt, *first.tokens, 5], 8, 4))
    assert second.stats.cached_tokens == N_BATCH
    crowded.run([first, second])


def test_a_prompt_is_read_in_the_same_chunks_beside_others(crowded: Engine) -> None:
    """An f16 cache would show it; here the passes themselves do."""
    crowded.slots.forget_all()
    source = crowded.target.vocabulary.tokenize(PYTHON_SOURCE)
    passes: list[list[int]] = []
    run = crowded.target.run

    def noted(batch: Batch) -> None:
        passes.append([part.n_rows for part in batch.parts])
        run(batch)

    running = [crowded.begin(request(source[9:20], 8, 60))]
    crowded.step(running)
    running += [crowded.begin(request([at, *source[:149]], 8, 4)) for at in (7, 8)]
    crowded.target.run = noted  # type: ignore[method-assign]
    try:
        crowded.run(running)
    finally:
        del crowded.target.run
    wide = [rows for rows in passes if max(rows) > 16]
    assert sorted(wide) == sorted([[64], [64], [22]] * 2)


def test_a_copied_beginning_of_a_sliding_window_is_whole_or_nothing(tmp_path: Path) -> None:
    """llama.cpp saves no cells behind a window, where a shorter beginning may need them."""
    path = write_windowed(tmp_path / "windowed.gguf", mini_pair.pair()[0], window=32)
    tokens = list(range(40, 241))
    with open_target(path, n_ctx=1024, n_seq=2, exact=True, tapped_layers=()) as target:
        target.decode(tokens[:200], range(200), [0] * 200, [False] * 200)
        rows = []
        assert target.copy(0, 1, 200)
        for seq in (0, 1):
            target.decode(tokens[200:], [200], [seq], [True])
            rows.append(target.logits(0).copy())
        np.testing.assert_array_equal(*rows)
        target.clear(1)
        assert not target.copy(0, 1, 100)
        target.decode(tokens[:9], range(9), [1] * 9, [False] * 8 + [True])  # it is empty
        assert target.sees(1, 9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "message"), [("f32", "logit moves"), ("qwen35", "recurrent")])
def test_where_rows_do_not_round_alone_several_are_refused(
    tmp_path: Path, kind: str, message: str
) -> None:
    """F32 rows round by how many are beside them; recurrent states are not kept apart."""
    if kind == "f32":
        path = mini_pair.pair("F32")[0]
    else:
        path = hybrid.write_hybrid(tmp_path / "model.gguf", kind, tiny_coder.pair()[0])
    options: dict[str, Any] = {"exact": True, "n_gpu_layers": 0, "n_ctx": 512, "quiet": True}
    with pytest.raises(InputError, match=message):
        load(path, "none", n_seq=2, **options)
    load(path, "none", n_seq=1, **options).close()
