"""The compiled part; see native/module.cpp."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_local.gguf.drafter_spec import DrafterSpec

def llama_decode_address() -> int: ...
def edit_cells(
    context: int,
    cuts: Sequence[tuple[int, int]],
    copies: Sequence[tuple[int, int, int, int]],
) -> None: ...
def grow_tree(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    n_vocab: int,
    n_nodes: int,
    n_leaves: int,
    n_depth: int,
    steps: NDArray[np.float32] | None = None,
) -> tuple[list[int], list[int], list[float]]: ...

class CopyIndex:
    n_cells: int
    n_lengths: int
    n_agreements: int
    n_bytes: int
    def extend(self, tokens: Sequence[int]) -> None: ...
    def extend_by(self, other: CopyIndex) -> None: ...
    def goes_on(self, other: CopyIndex) -> bool: ...
    def begins_with(self, other: CopyIndex) -> bool: ...
    def find(self, n_copies: int, n_tokens: int) -> list[tuple[list[int], list[int]]]: ...
    def __len__(self) -> int: ...

class TargetPass:
    def __init__(
        self,
        context: int,
        n_seq: int,
        n_batch: int,
        layers: Sequence[int],
        n_stored: int,
        in_graph: bool,
        n_branches: int = 1,
    ) -> None: ...
    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seqs: Sequence[int],
        output: Sequence[bool],
        ids: Sequence[Sequence[int]] = (),
    ) -> int: ...
    def decode_ahead(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seqs: Sequence[int],
        n_steps: int,
        given: Sequence[int] = (),
    ) -> tuple[int, list[int]]: ...
    @property
    def best(self) -> list[int]: ...
    def logits(self, output_row: int) -> NDArray[np.float32]: ...
    def candidates(
        self, output_row: int, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...
    def search(self, output_row: int, k: int) -> bool: ...
    def chunk_sums(
        self, output_row: int, temperature: float
    ) -> tuple[NDArray[np.float32], float]: ...
    def chunk(self, output_row: int, index: int) -> NDArray[np.float32]: ...
    def log_sum(self, output_row: int) -> float: ...
    search_on_cpu: bool
    def hidden_states(self, rows: Sequence[int]) -> NDArray[np.float32]: ...
    @property
    def first_stored(self) -> int: ...
    @property
    def n_stored(self) -> int: ...
    @property
    def n_rebuilds(self) -> int: ...

class TokenDraw:
    def __init__(
        self,
        n_vocab: int,
        altering: int,
        cutting: int,
        choosing: int,
        top_k: int,
        top_p: float,
        min_p: float,
        reorders: bool,
        most_raised: float,
        temperature: float,
        seed: int,
    ) -> None: ...
    def chunk_of(self, sums: NDArray[np.float32], peak: float) -> int: ...
    def from_chunk(self, logits: NDArray[np.float32]) -> int: ...
    def from_row(self, logits: NDArray[np.float32]) -> int: ...
    def from_candidates(
        self, ids: NDArray[np.int32], logits: NDArray[np.float32], log_sum: float
    ) -> int: ...
    def in_order_of(self, logits: NDArray[np.float32]) -> int: ...

class ThreadPool:
    def __init__(self, n_threads: int) -> None: ...
    def attach(self, context: int) -> None: ...

class FusedDrafter:
    def __init__(
        self,
        model: int,
        target_pass: TargetPass | None,
        path: str,
        spec: DrafterSpec,
        n_seq: int,
        n_ctx: int,
        top_k: int,
        n_threads: int,
        draft_window: int = 0,
        threads: ThreadPool | None = None,
    ) -> None: ...
    @property
    def n_builds(self) -> int: ...
    @property
    def n_cache_bytes(self) -> int: ...
    @property
    def n_compute_bytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def top_k(self) -> int: ...
    def length(self, seq: int) -> int: ...
    def inject(self, seq: int, features: NDArray[np.float32]) -> None: ...
    def inject_stored(self, seq: int, rows: Sequence[int]) -> None: ...
    def begin(
        self,
        seqs: Sequence[int],
        features: Sequence[NDArray[np.float32]],
        anchors: Sequence[int],
        n_draft: int,
    ) -> None: ...
    def begin_stored(
        self,
        seqs: Sequence[int],
        rows: Sequence[Sequence[int]],
        anchors: Sequence[int],
        n_draft: int,
    ) -> None: ...
    def read(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32] | None]: ...
    def truncate(self, seq: int, length: int) -> None: ...
    def copy(self, source: int, target: int, length: int) -> None: ...
    def n_visible(self, seq: int, length: int) -> int: ...
    def save(self, seq: int) -> NDArray[np.uint8]: ...
    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None: ...
