"""Engines on tiny targets with recurrent layers, and drafters that know the answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_coder
from adversarial import ScriptedDrafter
from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest
from dflash_local.fit.architectures import TAPPED_ARCHITECTURES, WayBack
from dflash_local.gguf.file import GgufFile
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from hybrid import SNAPSHOTS, TAPS, write_hybrid
from plain_answer import Plain, plain_tokens

BLOCK = 16


@contextmanager
def hybrid_target(path: Path, *, drafts: bool = True, **options: Any) -> Iterator[Target]:
    """A target that is exact to the bit, for drafts of a block or for none."""
    defaults: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_batch": 64, "kv_type": "q8_0"}
    architecture = GgufFile.open(path).architecture
    if drafts and architecture in TAPPED_ARCHITECTURES:
        defaults |= {"tapped_layers": TAPS}
    if drafts and architecture in SNAPSHOTS:
        defaults |= {"way_back": WayBack("snapshots", BLOCK - 1)}
    with Target(path, TargetOptions(**defaults | options)) as target:
        yield target


@pytest.fixture(scope="module")
def path(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of that architecture."""
    file = tmp_path_factory.mktemp("hybrid") / f"{kind[0]}.gguf"
    return write_hybrid(file, kind[0], tiny_coder.pair()[0])


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Plain]:
    with hybrid_target(path, drafts=False) as target:
        yield partial(plain_tokens, target)


class Knowing(ScriptedDrafter):
    """Knows the whole texts of all sequences, and drafts `n_right()` right tokens, then wrong ones
    to the end of the block."""

    saves_rows = True

    def __init__(self, n_right: Callable[[], int], n_vocab: int, n_seq: int = 1) -> None:
        super().__init__(self._nothing, block_size=BLOCK, n_seq=n_seq)
        self.texts: list[list[int]] = []
        self.n_right, self._n_vocab = n_right, n_vocab

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._one(request) for request in requests]

    def _one(self, request: DraftRequest) -> Draft:
        self.drafts += 1
        self.inject(request.seq, request.features)
        known = [*request.text, request.anchor]
        assert self.length(request.seq) == len(request.text)
        right = next((t[len(known) :] for t in self.texts if t[: len(known)] == known), [])
        tokens = (right + [0] * BLOCK)[: request.n_draft]
        good = self.n_right()
        return Draft.chain(tokens[:good] + [(t + 1) % self._n_vocab for t in tokens[good:]])

    def inject(self, seq: int, features: NDArray[np.float32]) -> None:
        if features.shape[1]:
            super().inject(seq, features)
        else:  # of a target whose layers cannot be tapped
            self._lengths[seq] += len(features)

    def save(self, seq: int) -> NDArray[np.uint8]:
        return np.array([self.length(seq)], "<i4").view(np.uint8)

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        self._lengths[seq] = int(saved.view("<i4")[0])

    @staticmethod
    def _nothing(_at: int, _anchor: int, _n: int) -> Draft:
        raise AssertionError
