"""A native drafter beside its PyTorch reference: given the same calls, and compared."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.target_model.target import Target
from random_model import LOGIT_STD
from reference import Reference
from synthetic import write_drafter, write_target

torch.set_num_threads(1)  # the products are small

# Set it to -1 to test on the GPU that llama.cpp finds.
GPU_LAYERS = int(os.environ.get("DFLASH_TEST_GPU_LAYERS", "0"))

# Relative error of an activation, as ggml rounds it for a product with weights of this type:
# half a unit in the last place, or for 8 bits half a step of a block whose largest is about 2 rms.
# Tensor cores take F32 as TF32, which has the digits of F16.
ROUNDING = {"F32": 2**-11, "F16": 2**-11, "BF16": 2**-8} | dict.fromkeys(
    ("Q8_0", "Q4_0", "Q4_K", "Q6_K"), 2**-7
)
PRODUCTS = 2, 7  # in all, and per layer, one after the other
# Softmax amplifies errors a little, and these are the largest of many.
RMS_LIMIT, LARGEST_LIMIT = 2.5, 12.0


class Twin:
    """A native drafter and its reference, which are given the same calls and compared."""

    def __init__(
        self,
        drafter: Path,
        target_path: Path,
        target: Target,
        *,
        quant: str = "F32",
        n_seq: int = 1,
        n_ctx: int = 512,
        draft_window: int = 0,
        top_k: int = 16,
        n_threads: int = 1,
    ) -> None:
        self.native = FusedDrafter(
            drafter,
            target,
            read_drafter(GgufFile.open(drafter)),
            n_seq=n_seq,
            n_ctx=n_ctx,
            draft_window=draft_window,
            top_k=top_k,
            n_threads=n_threads,
        )
        # A cache of halves is part of what the native drafter is, not an error of it.
        self.reference = Reference(drafter, target_path, cache_dtype=torch.float16)
        self.reference.draft_window = draft_window
        self.block_size = self.reference.block_size
        self._rounding = ROUNDING[quant]
        self._n_seq = n_seq
        self._random = np.random.default_rng(7)

    def features(self, n_rows: int) -> NDArray[np.float32]:
        shape = (n_rows, self.reference.feature_size)
        return self._random.standard_normal(shape, dtype=np.float32)

    def inject(self, seq: int, n_rows: int) -> None:
        features = self.features(n_rows)
        self.native.inject(seq, features)
        self.reference.inject(seq, features)

    def draft(self, rows: Mapping[int, int], n_draft: int | None = None) -> list[Draft]:
        """Draft for sequences at once, each with so many new rows of features, and compare."""
        n_draft = n_draft or self.native.block_size - 1
        requests = [
            DraftRequest(seq, int(self._random.integers(300)), self.features(n), n_draft)
            for seq, n in rows.items()
        ]
        drafts = self.native.draft(requests)
        assert len(drafts) == len(requests)
        for request, draft in zip(requests, drafts, strict=True):
            self.reference.inject(request.seq, request.features)
            assert self.native.length(request.seq) == self.reference.length(request.seq)
            expected = self.reference.draft(request.seq, request.anchor)[: request.n_draft]
            self.check(draft, expected, self.noise(request.seq))
        return drafts

    def truncate(self, seq: int, length: int) -> None:
        self.native.truncate(seq, length)
        self.reference.truncate(seq, length)

    def copy(self, source: int, destination: int, length: int) -> None:
        self.native.copy(source, destination, length)
        self.reference.copy(source, destination, length)

    def restart(self) -> None:
        self._random = np.random.default_rng(7)
        for seq in range(self._n_seq):
            self.truncate(seq, 0)

    def noise(self, seq: int) -> float:
        """Expected rms error of a logit, in nats.

        Independent relative errors: one for each product with weights, and in each attention the
        2^-11 of a half for each key, as queries, weights and sums over keys are halves there.
        """
        n_layer = self.reference.n_layer
        products = (PRODUCTS[0] + PRODUCTS[1] * n_layer) * self._rounding**2
        keys = n_layer * (self.reference.length(seq) + self.block_size) * 2**-22
        return LOGIT_STD * math.sqrt(products + keys)

    @staticmethod
    def check(draft: Draft, expected: torch.Tensor, noise: float) -> None:
        """`draft` holds the best candidates of `expected` [n_draft, n_vocab], to the tolerance."""
        assert draft.candidates is not None
        ids = torch.from_numpy(draft.candidates.ids.astype(np.int64))
        logprobs = torch.from_numpy(draft.candidates.logprobs).double()
        assert len(ids) == len(expected)
        assert draft.tokens == ids[:, 0].tolist()
        assert draft.logprobs == pytest.approx(logprobs[:, 0].tolist())
        assert draft.parents == list(range(-1, len(ids) - 1))
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert (logprobs.diff(dim=1) <= 0).all()
        of_ids = expected.gather(1, ids)
        error = logprobs - of_ids
        assert error.abs().max() < LARGEST_LIMIT * noise
        assert error.square().mean().sqrt() < RMS_LIMIT * noise
        last = expected.topk(ids.shape[1]).values[:, -1]
        assert (of_ids.min(dim=1).values > last - LARGEST_LIMIT * noise).all()

    def assert_not(self, seq: int, wrong: torch.Tensor) -> None:
        """Were the native drafter's `wrong`, it would have failed: the tolerance is not slack."""
        right = self.reference.draft(seq, anchor=11)
        known = right.isfinite()  # all tokens, unless the drafter knows only some
        error = (wrong - right)[known].square().mean().sqrt()
        assert error > 2 * RMS_LIMIT * self.noise(seq)


TWIN_OPTIONS = ("n_seq", "n_ctx", "draft_window", "top_k", "n_threads")
TwinMaker = Callable[..., Twin]


@pytest.fixture(scope="module")
def make_twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwinMaker]:
    """Make a twin of a drafter with these options; targets are loaded once per shape."""
    folder = tmp_path_factory.mktemp("twins")
    targets: dict[str, Target] = {}
    twins: list[Twin] = []

    def make(
        *,
        n_embd: int = 64,
        quant: str = "F32",
        tied: bool = True,
        n_vocab: int = 320,
        **options: Any,
    ) -> Twin:
        of_twin = {name: options.pop(name) for name in TWIN_OPTIONS if name in options}
        name = f"{n_embd}-{quant}-{tied}-{n_vocab}"
        path = folder / f"{name}.gguf"
        if name not in targets:
            write_target(
                path,
                n_layer=6,
                n_embd=n_embd,
                head_dim=64,
                n_vocab=n_vocab,
                n_ff=256,
                quant=quant,
                tied=tied,
            )
            targets[name] = Target.load(path, n_ctx=64, n_threads=1, n_gpu_layers=GPU_LAYERS)
        drafter = folder / f"drafter-{len(twins)}.gguf"
        options.setdefault("n_ff", 2 * n_embd)
        write_drafter(drafter, path, quant=quant, **options)
        twins.append(Twin(drafter, path, targets[name], quant=quant, **of_twin))
        return twins[-1]

    yield make
    for twin in twins:
        twin.native.close()
    for target in targets.values():
        target.close()
