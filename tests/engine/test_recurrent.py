"""Chains on targets with recurrent layers: the text is that of plain decoding, to the bit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_local.controller.controller import Controller
from dflash_local.controller.costs import Costs
from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence as Answer
from dflash_local.errors import BackendError, InputError
from dflash_local.fit.architectures import WayBack
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.target import Target
from hybrid import REPLAYED, TAPPED
from hybrid_engine import BLOCK, Knowing, hybrid_target, path, plain
from pair_engine import answer, consistent, request
from plain_answer import Plain

__all__ = ["path", "plain"]  # fixtures

N = 40
SEEDED = {"temperature": 0.8, "seed": 5, "repeat_penalty": 1.1}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": SEEDED}
N_SEQ = 4
KINDS = [(name, "snapshots") for name in (*TAPPED, "nemotron_h", "nemotron_h_moe")]
KINDS += [(name, "replay") for name in REPLAYED]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An architecture, and how its rejected rows are taken back."""
    return tuple(request.param)


@pytest.fixture(scope="module")
def way_back(kind: tuple[str, Any]) -> WayBack:
    return WayBack(kind[1], BLOCK - 1)


@pytest.fixture(scope="module")
def target(path: Path, way_back: WayBack) -> Iterator[Target]:
    with hybrid_target(path, way_back=way_back) as opened:
        assert (opened.way_back, opened.max_width) == (way_back, BLOCK)
        yield opened


@pytest.fixture(scope="module")
def targets(path: Path, way_back: WayBack) -> Iterator[Target]:
    """For several sequences at once."""
    with hybrid_target(path, n_seq=N_SEQ, way_back=way_back) as opened:
        yield opened


def prompts(target: Target, n: int = N_SEQ) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, target.n_vocab - 8, 7 + 9 * i).tolist() for i in range(n)]


def engine_of(
    target: Target, texts: list[list[int]], n_right: Callable[[], int]
) -> tuple[Engine, Knowing]:
    for seq in range(target.options.n_seq):
        target.clear(seq)
    drafter = Knowing(n_right, target.n_vocab, target.options.n_seq)
    drafter.texts = texts
    return Engine(target, drafter, n_seq=target.options.n_seq), drafter


def knowing(
    target: Target, plain: Plain, asked: list[list[int]], n: int, n_right: Callable[[], int]
) -> tuple[Engine, list[list[int]]]:
    """An engine whose drafter knows the answers to these prompts, and the answers."""
    right = [plain(prompt, n) for prompt in asked]
    texts = [prompt + tokens for prompt, tokens in zip(asked, right, strict=True)]
    return engine_of(target, texts, n_right)[0], right


def at_random(seed: int, most: int = BLOCK) -> Callable[[], int]:
    rng = np.random.default_rng(seed)
    return lambda: int(rng.integers(0, most))


def check(engine: Engine, drafter: Knowing, sequence: Answer, right: list[int]) -> None:
    assert sequence.tokens == right
    stats = sequence.stats
    assert stats.emitted == 1 + stats.rounds + stats.accepted
    consistent(engine, drafter, len(sequence.request.prompt) + len(right) - 1, sequence.slot.seq)


@pytest.mark.one_in(12)
def test_the_answers_vary(target: Target, plain: Plain) -> None:
    """If they did not, a wrong state would not show."""
    for prompt in prompts(target):
        assert len(set(plain(prompt, N))) > N // 3


@pytest.mark.one_in(10)
def test_every_accepted_length_occurs(target: Target, plain: Plain, kind: tuple[str, str]) -> None:
    """Greedy and seeded in turn, as the rows that go back do not depend on the draw."""
    way = list(WAYS)[KINDS.index(kind) % 2]
    (prompt,) = prompts(target, 1)
    right = plain(prompt, 200, **WAYS[way])
    lengths = cycle([*range(BLOCK), *reversed(range(BLOCK))])
    engine, drafter = engine_of(target, [prompt + right], lambda: next(lengths))
    found = answer(engine, prompt, BLOCK, 200, **WAYS[way])
    check(engine, drafter, found, right)
    assert set(found.stats.accepted_lengths) >= set(range(1, BLOCK + 1))


@pytest.mark.one_in(8)
def test_tokens_that_no_draft_should_hold(target: Target, plain: Plain) -> None:
    """Ends of text, and ids out of range, after some right tokens: the states go back as far."""
    (prompt,) = prompts(target, 1)
    right = plain(prompt, 2 * N)
    ends = [token for token in range(target.n_vocab) if target.vocabulary.ends_text(token)]
    bad = cycle([*ends[:2], -1, target.n_vocab, 2**31 - 1])
    engine, drafter = engine_of(target, [prompt + right], lambda: 5)
    drafted = drafter.draft

    def draft(requests: Sequence[DraftRequest]) -> list[Draft]:
        worst = next(bad)
        return [Draft.chain([*one.tokens[:5], *[worst] * 10]) for one in drafted(requests)]

    drafter.draft = draft  # type: ignore[method-assign]
    found = answer(engine, prompt, BLOCK, 2 * N)
    check(engine, drafter, found, right)
    assert found.stats.accepted > 0


@pytest.mark.one_in(30)
@pytest.mark.parametrize("widths", [(16, 16, 16, 16), (16, 5, 0, 8), (2, 16, 7, 3)])
def test_several_sequences_of_unequal_widths(
    targets: Target, plain: Plain, kind: tuple[str, str], widths: tuple[int, ...]
) -> None:
    """Greedy and seeded in turn: each kind, and each of these widths, is both."""
    way = list(WAYS)[(KINDS.index(kind) + sum(widths)) % 2]
    asked = prompts(targets)
    right = [plain(prompt, N + 9 * i, **WAYS[way]) for i, prompt in enumerate(asked)]
    texts = [prompt + tokens for prompt, tokens in zip(asked, right, strict=True)]
    engine, drafter = engine_of(targets, texts, at_random(2))
    sequences = [
        engine.begin(request(prompt, width, N + 9 * i, **WAYS[way]))
        for i, (prompt, width) in enumerate(zip(asked, widths, strict=True))
    ]
    engine.run(sequences)
    for sequence, tokens, width in zip(sequences, right, widths, strict=True):
        assert sequence.tokens == tokens
        if width:
            check(engine, drafter, sequence, tokens)
            assert sequence.stats.accepted > 0


@pytest.mark.one_in(10)
def test_widths_that_a_controller_chooses_for_several(targets: Target, plain: Plain) -> None:
    asked = prompts(targets)
    for row_s in (1e-5, 3e-4):
        engine, right = knowing(targets, plain, asked, 2 * N, at_random(4, 9))
        steps = {n: 1e-3 + row_s * n for n in (1, 3, 16, 64)}
        engine.control(Controller(Costs({100: steps}, {100: {1: 1e-4}}), BLOCK, pads=True))
        sequences = [engine.begin(request(prompt, "auto", 2 * N)) for prompt in asked]
        engine.run(sequences)
        assert [sequence.tokens for sequence in sequences] == right
        assert sum(sequence.stats.rounds for sequence in sequences) > 0


@pytest.mark.one_in(10)
def test_sequences_that_come_and_go(targets: Target, plain: Plain) -> None:
    """Prompts are read while others draft; slots change hands; a full context cuts drafts."""
    asked = [*prompts(targets), *[[*p, 7, 8] for p in prompts(targets)]]
    engine, right = knowing(targets, plain, asked, N, at_random(3))
    waiting, running, done = list(enumerate(asked)), {}, {}
    for step in count():
        if waiting and len(running) < N_SEQ and step % 3 == 0:
            i, prompt = waiting.pop(0)
            running[i] = engine.begin(request(prompt, (16, 4)[i % 2], N))
        engine.step(list(running.values()))
        for i in [i for i, sequence in running.items() if sequence.finish_reason]:
            done[i] = running.pop(i)
            engine.end(done[i])
        if not waiting and not running:
            break
    assert [done[i].tokens for i in range(len(asked))] == right


@pytest.mark.one_in(5)
def test_a_suspended_answer_goes_on(targets: Target, plain: Plain) -> None:
    asked = prompts(targets)[:2]
    engine, right = knowing(targets, plain, asked, N, lambda: 3)
    sequences = [engine.begin(request(prompt, 8, N)) for prompt in asked]
    for _ in range(4):
        engine.step(sequences)
    engine.suspend(sequences[0])
    engine.slots.forget_all()
    engine.step(sequences[1:])
    engine.resume(sequences[0])
    engine.run(sequences)
    assert [sequence.tokens for sequence in sequences] == right


@pytest.mark.one_in(48)
@pytest.mark.parametrize("width", [0, 16])
def test_turns_after_an_answer_that_was_stopped(target: Target, plain: Plain, width: int) -> None:
    """It stops inside a draft, or inside several plain steps at once. The slot's tokens are then
    cut, or all decoded again; the next turn is that of empty caches."""
    (prompt,) = prompts(target, 1)
    right = plain(prompt, N)
    for stop_after in range(1, 24, 2):
        kept = right[:stop_after]
        following = [*prompt, *kept, 5, 6, 7]
        next_right = plain(following, N)
        engine, drafter = engine_of(target, [prompt + right, following + next_right], lambda: 9)
        left = iter(range(stop_after - 1, -1, -1))
        asked = replace(request(prompt, width, N), on_token=lambda _, left=left: next(left) == 0)
        sequence = engine.begin(asked)
        engine.run([sequence])
        assert (sequence.tokens, sequence.finish_reason) == (kept, "stop")
        assert answer(engine, following, 16, N).tokens == next_right
        # The text that was left, once more, and one that forks off inside of it.
        assert answer(engine, prompt, 16, N).tokens == right
        forked = [*prompt, *right[:3], 9]
        assert answer(engine, forked, 16, 12).tokens == plain(forked, 12)
        del drafter


@pytest.mark.one_in(3)
def test_trees_become_chains(target: Target) -> None:
    (prompt,) = prompts(target, 1)
    engine, _ = engine_of(target, [], lambda: 0)
    assert not engine.takes_trees and engine.max_width == BLOCK
    found = answer(engine, prompt, 8, 8, shape="tree")
    assert found.stats.leaves == 0 and found.stats.drafted > 0
    assert "recurrent layers, which know no branches" in (found.stats.drafting or "")


@pytest.mark.parametrize(
    "kind", [("qwen35", "snapshots"), ("qwen35", "replay")], indirect=True, ids="-".join
)
def test_a_block_is_cut_to_what_can_be_taken_back(
    path: Path, way_back: WayBack, plain: Plain
) -> None:
    with hybrid_target(path, way_back=replace(way_back, rows=4)) as target:
        (prompt,) = prompts(target, 1)
        right = plain(prompt, N)
        engine, drafter = engine_of(target, [prompt + right], lambda: BLOCK)
        assert engine.max_width == 5
        found = answer(engine, prompt, 5, N)
        check(engine, drafter, found, right)
        assert max(found.stats.accepted_lengths) == 5
        for shape in ("chain", "tree"):
            with pytest.raises(InputError, match="recurrent state allows at most 5"):
                answer(engine, prompt, 6, N, shape=shape)


@pytest.mark.one_in(10)
def test_a_pass_that_fails_leaves_no_idle_sequence(
    targets: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have moved their states."""
    first, second, *_ = prompts(targets)
    engine, _ = engine_of(targets, [], lambda: 0)
    answer(engine, first, 0, 4)
    assert any(slot.cached for slot in engine.slots)

    def fail(_target: Target, _batch: Batch) -> None:
        raise BackendError("no room")

    with monkeypatch.context() as patched, pytest.raises(BackendError, match="no room"):
        patched.setattr(Target, "run", fail)
        answer(engine, second, 0, 4)
    assert not any(slot.cached for slot in engine.slots)
