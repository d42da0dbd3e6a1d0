"""Sequences of a recurrent target beside plain decoding: a wrong state shows in the next logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.fit.architectures import WayBack
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target

N_SEQ = 3
NOISE = 0.1
Logits = NDArray[np.float32]


def opened(path: Path, **options: Any) -> Target:
    defaults = {"n_ctx": 512, "n_threads": 1, "n_batch": 64, "kv_type": "q8_0"}
    return Target(path, TargetOptions(**defaults | options))


class Plain:
    """The logits after any text, decoded one token at a time without snapshots."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._target = opened(path, **options)
        self._text: list[int] = []
        self._logits: Logits | None = None

    def after(self, text: Sequence[int]) -> Logits:
        if self._text != list(text[: len(self._text)]):
            self._target.clear(0)
            self._text = []
        for token in text[len(self._text) :]:
            self._target.decode([token], [len(self._text)], [0], [True])
            self._text.append(token)
            self._logits = self._target.logits(0).copy()
        assert self._logits is not None
        return self._logits

    def close(self) -> None:
        self._target.close()


class Texts:
    """The sequences of a target with snapshots, and the text that each one should have."""

    def __init__(self, target: Target, plain: Plain, seed: int = 0) -> None:
        self.target, self.plain = target, plain
        self.errors: list[float] = []
        """The largest error of a logit in each row so far."""
        self.most_error = 0.0
        self.rng = np.random.default_rng(seed)
        self.texts: list[list[int]] = [[] for _ in range(target.options.n_seq)]
        for seq in range(len(self.texts)):
            target.clear(seq)

    def decode(self, seqs: Sequence[int], n_rows: int) -> None:
        """So many random tokens for each of these sequences, and all their logits are right."""
        tokens, positions, ids = [], [], []
        for seq in seqs:
            begin = len(self.texts[seq])
            new = self.rng.integers(0, self.target.n_vocab, n_rows).tolist()
            self.texts[seq] += new
            tokens += new
            positions += range(begin, begin + n_rows)
            ids += [seq] * n_rows
        self.target.decode(tokens, positions, ids, [True] * len(tokens))
        for i, (seq, position) in enumerate(zip(ids, positions, strict=True)):
            right = self.plain.after(self.texts[seq][: position + 1])
            self.errors.append(float(np.abs(self.target.logits(i) - right).max()))
            assert self.errors[-1] <= self.most_error, (seq, position)

    def cut(self, seq: int, length: int) -> bool:
        done = self.target.truncate(seq, length)
        if done:
            del self.texts[seq][length:]
        return done


def any_history(texts: Texts) -> None:
    """Passes over some sequences, cuts, copies, checkpoints and new texts in any order."""
    rng, target = texts.rng, texts.target
    checkpoints: dict[int, Any] = {}
    n_cuts = 0
    for _ in range(50):
        seq = int(rng.integers(N_SEQ))
        length = len(texts.texts[seq])
        match int(rng.integers(8)):
            case 0 if length > 40:
                assert texts.cut(seq, 0)
                checkpoints.pop(seq, None)
            case 1:
                other = (seq + 1) % N_SEQ
                if target.can_copy(seq, length) and length:
                    target.clear(other)
                    target.copy(seq, other, length)
                    texts.texts[other] = list(texts.texts[seq])
                    checkpoints.pop(other, None)
            case 2 if length:
                checkpoints[seq] = target.checkpoint(seq, length)
            case 3 if seq in checkpoints and checkpoints[seq].length <= length:
                assert target.restore(seq, checkpoints[seq])
                del texts.texts[seq][checkpoints[seq].length :]
            case 4 | 5 if length > target.shortest(seq) > 0:
                n_cuts += 1
                to = int(rng.integers(target.shortest(seq), length))
                assert texts.cut(seq, to)
                if to % 2:  # a replay begins, as while a device drafts
                    target.tidy()
                if seq in checkpoints and checkpoints[seq].length > to:
                    del checkpoints[seq]
            case _:
                n = int(rng.integers(1, N_SEQ + 1))
                seqs = rng.permutation(N_SEQ)[:n].tolist()
                texts.decode(seqs, int(rng.integers(1, 12)))
    assert n_cuts > 2
    for seq in range(N_SEQ):
        texts.decode([seq], 2)


def check_every_number_of_rows(texts: Texts, n_rows: int) -> None:
    """All rows of a pass of so many but its first can be taken back."""
    texts.decode([0], 9)
    for n_kept in range(1, n_rows + 1):
        begin = len(texts.texts[0])
        texts.decode([0], n_rows)
        assert texts.target.shortest(0) == begin + 1
        assert texts.cut(0, begin + n_kept)
        texts.decode([0], 1 + n_kept % 2)


def check_any_history(path: Path, *, routed: bool, way_back: WayBack) -> None:
    """Passes over some sequences, cuts, copies, checkpoints and new texts in any order leave the
    right states.

    The cells of attention are then in another order than in plain decoding, so sums round
    differently, and now and then a router chooses another expert. A wrong state is wrong by 3 and
    more, in this row and in all after it.
    """
    plain = Plain(path, kv_type="f32")
    with opened(path, n_seq=N_SEQ, kv_type="f32", way_back=way_back) as target:
        for seed in range(3):
            texts = Texts(target, plain, seed)
            texts.most_error = np.inf if routed else NOISE
            any_history(texts)
            assert np.mean(np.array(texts.errors) > NOISE) < 0.01
    plain.close()
