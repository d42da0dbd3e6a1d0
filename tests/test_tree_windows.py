"""Trees on a target with sliding windows, whose branches lose the cells behind them."""

from __future__ import annotations

import math
from pathlib import Path

from adversarial import ScriptedDrafter
from dflash_local import demo
from dflash_local.draft import ANCHOR, Draft
from dflash_local.engine import Engine
from pair_engine import answer, request
from shapes import exact_target
from windowed import write_windowed

N = 40
WINDOW = 16


def test_answers_longer_than_the_window(tmp_path: Path) -> None:
    """Two at once; then each goes on where it ended, and from further back."""
    path = write_windowed(tmp_path / "windowed.gguf", demo.pair()[0], WINDOW)
    with exact_target("tree", path, n_ctx=512, n_seq=2) as target:
        assert target.n_swa == WINDOW
        prompts = [target.vocabulary.tokenize(text) for text in demo.prompts()["code"][:2]]
        bare = Engine(target, None, 2)
        plain = [answer(bare, prompt, 0, 2 * N) for prompt in prompts]
        bare.forget_all()
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


def test_what_a_window_has_left_behind_is_not_taken_over(tmp_path: Path) -> None:
    """An answer goes on until the cells behind its window are given away; then its prompt comes
    again, to a free slot."""
    path = write_windowed(tmp_path / "windowed.gguf", demo.pair()[0], WINDOW)
    with exact_target("chain", path, n_ctx=256, n_seq=2, n_batch=16) as target:
        texts = [target.vocabulary.tokenize(text) for text in demo.prompts()["code"][:2]]
        other, prompt = ((text * 3)[:n] for text, n in zip(texts, (50, 40), strict=True))
        engine = Engine(target, None, 2)
        endless = {"logit_bias": dict.fromkeys(target.vocabulary.ends, -math.inf)}
        plain = answer(engine, prompt, 0, 12, **endless)
        engine.forget_all()
        filler = answer(engine, other, 0, 2)
        first = engine.begin(request(prompt, 0, 90, **endless))
        while not first.tokens:
            engine.step([first])
        engine.caches.forget(filler.slot)  # the cells before the prompt's
        while len(first.tokens) < 86:
            engine.step([first])
        assert not target.sees(first.slot.seq, len(prompt) - 1)
        again = engine.begin(request(prompt, 0, 12, **endless))
        engine.run([first, again])
        assert again.stats.cached_tokens == 0
        assert again.tokens == plain.tokens
