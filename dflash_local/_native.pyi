"""The compiled part; see native/module.cpp."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_local.gguf.drafter_spec import DrafterSpec

def llama_decode_address() -> int: ...
def can_replay(context: int = 0) -> bool: ...
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
    n_bytes: int
    def extend(self, tokens: Sequence[int]) -> None: ...
    def extend_by(self, other: CopyIndex) -> None: ...
    def goes_on(self, other: CopyIndex) -> bool: ...
    def begins_with(self, other: CopyIndex) -> bool: ...
    def __len__(self) -> int: ...

N_COPY_KINDS: int

class CopyPrior:
    tried: list[float]
    right: list[float]

class CopyChances:
    def __init__(self, prior: CopyPrior) -> None: ...
    def each(self, kinds: Sequence[int]) -> list[float]: ...

class CopyOffers:
    def __init__(self, prior: CopyPrior) -> None: ...
    def learn(self, index: CopyIndex, written: Sequence[int]) -> None: ...
    def find(
        self,
        index: CopyIndex,
        n_copies: int,
        n_tokens: int,
        least: NDArray[np.float64] | None = None,
    ) -> bool: ...
    def heard(self, offers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None: ...
    @property
    def last(self) -> list[tuple[list[int], list[int], list[float]]]: ...
    @property
    def chances(self) -> CopyChances: ...

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
        n_returned: int = 0,
        threads: ThreadPool | None = None,
    ) -> None: ...
    @property
    def can_keep(self) -> bool: ...
    def keep(self, seq: int, n_kept: int) -> None: ...
    def start_replay(self) -> None: ...
    def wait(self) -> None: ...
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
        draws: Sequence[TokenDraw | None],
        given: Sequence[int],
    ) -> tuple[int, list[int]]: ...
    def draw(self, how: TokenDraw | None, output_row: int) -> int: ...
    @property
    def draw_s(self) -> float: ...
    @property
    def n_whole_rows(self) -> int: ...
    @property
    def best(self) -> list[int]: ...
    def logits(self, output_row: int) -> NDArray[np.float32]: ...
    def candidates(
        self, output_row: int, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...
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
        n_candidates: int,
        bound: bool,
    ) -> None: ...
    def from_row(self, logits: NDArray[np.float32]) -> int: ...
    def accept(self, tokens: Sequence[int]) -> None: ...

class ThreadPool:
    def __init__(self, n_threads: int) -> None: ...
    def attach(self, context: int) -> None: ...
    def use(self, n: int) -> None: ...

class FusedDrafter:
    n_rounds: int
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
    def top_k(self) -> int: ...
    def length(self, seq: int) -> int: ...
    def inject(self, seq: int, features: Sequence[int] | NDArray[np.float32]) -> None: ...
    def begin(
        self,
        seqs: Sequence[int],
        features: Sequence[Sequence[int] | NDArray[np.float32]],
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
