"""Trees on a target with sliding windows, whose branches lose the cells behind them."""

import math
from pathlib import Path
from typing import Any

import pytest

import mini_pair
import tiny_coder
from adversarial import ScriptedDrafter, forked, oracle
from dflash_local.draft.draft import ANCHOR, Draft
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence as Answer
from pair_engine import answer, request
from shapes import exact_target
from windowed import write_windowed

N = 40
WINDOW = 16
SMALL: dict[str, Any] = {"n_ctx": 256, "n_seq": 2, "n_batch": 16, "tapped_layers": (1,)}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windowed") / "windowed.gguf"
    return write_windowed(path, mini_pair.pair()[0], WINDOW)


@pytest.mark.slow
def test_answers_longer_than_the_window(windowed: Path) -> None:
    """Two at once; then each goes on where it ended, and from further back."""
    with exact_target("tree", windowed, n_ctx=512, n_seq=2, tapped_layers=(1,)) as target:
        assert target.n_swa == WINDOW
        prompts = [target.vocabulary.tokenize(text) for text in tiny_coder.prompts()["code"][:2]]
        bare = Engine(target, None, 2)
        plain = [answer(bare, prompt, 0, 2 * N) for prompt in prompts]
        bare.slots.forget_all()
        texts = [[*run.request.prompt, *run.tokens] for run in plain]

        def script(anchor_at: int, anchor: int, _n: int) -> Draft:
            """Three right tokens, each after a wrong one with another below."""
            known = [text for text in texts if text[anchor_at : anchor_at + 1] == [anchor]]
            tokens: list[int] = []
            parents: list[int] = []
            parent = ANCHOR
            for token in known[0][anchor_at + 1 : anchor_at + 4] if known else []:
                first = len(tokens)
                tokens += [(token + 1) % target.n_vocab, anchor, token]
                parents += [parent, first, parent]
                parent = first + 2
            return Draft(tokens, parents)

        engine = Engine(target, ScriptedDrafter(script, n_seq=2), 2)
        for begin, n in ((0, N), (N, N), (N - 3 * WINDOW // 2, N)):
            asked = [text[: len(text) - 2 * N + begin] for text in texts]
            sequences = [engine.begin(request(each, 16, n, shape="tree")) for each in asked]
            if begin >= N:
                assert all(s.stats.cached_tokens > 0 for s in sequences)
            engine.run(sequences)
            for text, each, sequence in zip(texts, asked, sequences, strict=True):
                assert sequence.tokens == text[len(each) :][:n]
                assert sequence.stats.side_rounds > n // 8


def test_what_a_window_has_left_behind_is_not_taken_over(windowed: Path) -> None:
    """An answer goes on until the cells behind its window are given away; then its prompt comes
    again, to a free slot."""
    with exact_target(
        "chain", windowed, tapped_layers=(1,), n_ctx=256, n_seq=2, n_batch=16
    ) as target:
        texts = [target.vocabulary.tokenize(text) for text in tiny_coder.prompts()["code"][:2]]
        other, prompt = ((text * 3)[:n] for text, n in zip(texts, (50, 40), strict=True))
        engine = Engine(target, None, 2)
        endless = {"logit_bias": dict.fromkeys(target.vocabulary.ends, -math.inf)}
        plain = answer(engine, prompt, 0, 12, **endless)
        engine.slots.forget_all()
        filler = answer(engine, other, 0, 2)
        first = engine.begin(request(prompt, 0, 90, **endless))
        while not first.tokens:
            engine.step([first])
        engine.slots.forget(filler.slot)  # the cells before the prompt's
        while len(first.tokens) < 86:
            engine.step([first])
        assert not target.sees(first.slot.seq, len(prompt) - 1)
        again = engine.begin(request(prompt, 0, 12, **endless))
        engine.run([first, again])
        assert again.stats.cached_tokens == 0
        assert again.tokens == plain.tokens


@pytest.mark.slow
def test_trees_after_chains_that_gave_cells_away(windowed: Path) -> None:
    """Chains take the cells behind the window from the first branch; the others keep what trees
    have left them, until a tree needs them again."""
    with exact_target(
        "tree", windowed, tapped_layers=(1,), n_ctx=256, n_seq=2, n_batch=16
    ) as target:
        texts = [target.vocabulary.tokenize(text) for text in tiny_coder.prompts()["code"][:2]]
        other, prompt = ((text * 3)[:N] for text in texts)
        endless = {"logit_bias": dict.fromkeys(target.vocabulary.ends, -math.inf)}
        bare = Engine(target, None, 2)
        text = prompt + answer(bare, prompt, 0, 150, **endless).tokens
        bare.slots.forget_all()

        def script(anchor_at: int, _anchor: int, _n: int) -> Draft:
            return forked(text[anchor_at + 1 : anchor_at + 3], target.n_vocab)

        drafter = ScriptedDrafter(script, n_seq=2)
        engine = Engine(target, drafter, 2)

        def go_on(begin: int, n: int, shape: DraftShape) -> Answer:
            drafter.script = script if shape == "tree" else oracle(text)
            sequence = answer(engine, text[:begin], 8, n, shape=shape, **endless)
            assert sequence.tokens == text[begin : begin + n]
            assert sequence.stats.accepted >= n // 2
            return sequence

        filler = answer(engine, other, 0, 2)
        go_on(N, 20, "tree")
        go_on(N + 20, 30, "chain")
        engine.slots.forget(filler.slot)  # the cells before the prompt's
        chains = go_on(N + 50, 80, "chain")
        assert not target.sees(chains.slot.seq, N + 20)
        trees = go_on(N + 130, 20, "tree")
        assert trees.slot is chains.slot and trees.stats.cached_tokens == N + 129
        assert trees.stats.side_rounds > 0
