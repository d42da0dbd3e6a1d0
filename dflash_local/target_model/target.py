"""The target: a GGUF model in a llama.cpp context. Tokens in, logits and features out."""

from __future__ import annotations

import ctypes
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dflash_local.cuda.few_rows import FewRows
from dflash_local.errors import BackendError, ContextFullError, FileError, InputError
from dflash_local.fit.architectures import CELLS, OWN_STATE_ARCHITECTURES
from dflash_local.fit.options import (
    MAX_IDS,
    MAX_OUTPUT_ROWS,
    MAX_ROWS_AT_HOME,
    SPARE_IDS,
    STORED_ROWS,
    scaled_files,
)
from dflash_local.fit.pairing import check_taps, check_target
from dflash_local.gguf.adapter import control_vector, open_adapter
from dflash_local.gguf.file import GgufFile, file_key
from dflash_local.llama import native, runtime, workers
from dflash_local.llama.host import default_threads, give_back_memory
from dflash_local.llama.relay import Connection
from dflash_local.llama.runtime import api
from dflash_local.target_model import sequence_state
from dflash_local.target_model.batch import Batch, Part
from dflash_local.target_model.cells import Cells
from dflash_local.target_model.images import Embeddings
from dflash_local.target_model.options import TargetOptions, reads_in_place
from dflash_local.target_model.pass_threads import PassThreads
from dflash_local.target_model.readout import Readout
from dflash_local.target_model.replay import possible, rollback
from dflash_local.target_model.vocabulary import Vocabulary
from dflash_local.trial.model import ensure_loadable

_NO_SLOT = 1  # llama_decode: no room in the KV cache, nothing was changed


class Closable(Protocol):
    """Something that uses a target's tensors and must be closed before them."""

    def close(self) -> None:
        """Free everything. Safe to call again."""


@dataclass(frozen=True)
class StateCheckpoint:
    """A sequence of `length` tokens as it was once. `state` is empty without recurrent layers."""

    length: int
    state: NDArray[np.uint8]


class Target(Readout):
    """A loaded model and its context. Not thread safe: one thread owns it.

    Drafters that share its tensors register here and are closed with it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: TargetOptions,
        *,
        progress: Callable[[float], bool] | None = None,
        few_rows: FewRows | None = None,
        threads: native.ThreadPool | None = None,
    ) -> None:
        """Raises FileError if llama.cpp refuses the file, BackendError if memory is short.

        The file must have passed the checks of `load`: llama.cpp itself aborts on some bad files.
        `few_rows` are kernels of our own for its GPUs, which drafters on it use, too. `threads`
        are those of another target, to be shared.
        `progress` is called with the fraction that is loaded, 0 to 1. It ends the load by returning
        False.
        """
        super().__init__()
        runtime.init()
        self.path = Path(path)
        self.options = options
        self._lora = scaled_files("lora", options.lora)
        self._control_vectors = scaled_files("control_vectors", options.control_vectors)
        adapters = [Path(path) for path, _ in (*self._lora, *self._control_vectors)]
        self.file_key = [each for path in (self.path, *adapters) for each in file_key(path)]
        """Identifies the files as they were when they were loaded."""
        self.few_rows = few_rows
        self._drafters: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._workers: list[Connection] = []
        self._adapters: list[Any] = []
        self._model: Any = None
        self._context: Any = None
        self._expert_kernels = ""
        """What multiplies by experts in RAM in place of llama.cpp's kernels."""
        self.vocabulary: Vocabulary
        self._shared_threads = threads
        self.threads: Any = None
        """The `native.ThreadPool` that computes on the CPU, also for a drafter."""
        try:
            self._load(progress)
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Target:
        """Check a file, try it once in a child process, and load it with `TargetOptions`.

        Raises FileError for a bad file, InputError for layers that cannot be tapped and for options
        out of range, BackendError if the memory does not suffice. Warns where llama.cpp's graph has
        no room for as many snapshots of a recurrent state as are asked for.
        """
        wanted = TargetOptions(**options)
        file = GgufFile.open(path)
        check_target(file)
        check_taps(file, wanted.tapped_layers)
        way_back = ensure_loadable(
            file.path,
            None,
            layers=wanted.tapped_layers,
            n_gpu_layers=wanted.n_gpu_layers,
            way_back=wanted.way_back,
        )
        if way_back != wanted.way_back:
            warnings.warn(
                f"llama.cpp's graph has room for {way_back.rows} snapshots of this target's "
                f"recurrent state, not {wanted.way_back.rows}: so many rows can be taken back",
                stacklevel=2,
            )
        wanted = replace(wanted, way_back=way_back, in_place=reads_in_place(file))
        return cls(file.path, wanted)

    def _load(self, progress: Callable[[float], bool] | None) -> None:
        params = self.options.model_params()
        rpc = self.options.rpc if self.options.n_gpu_layers else ()

        def goes_on(part: float, _: object) -> bool:
            self._workers = workers.connections(rpc)
            return not self.lost and (progress is None or progress(part))

        # The name keeps the callback alive until the load has ended.
        report = api.llama_progress_callback(goes_on)
        params.progress_callback = report
        runtime.clear_log()
        self._model = api.llama_model_load_from_file(os.fsencode(self.path), params)
        self._check_workers()
        if not self._model:
            raise FileError(f"llama.cpp cannot load {self.path}: {runtime.reason()}")
        self.vocabulary = Vocabulary(api.llama_model_get_vocab(self._model))
        self.n_vocab = self.vocabulary.n_tokens
        self.n_embd: int = api.llama_model_n_embd(self._model)
        self.n_layer: int = api.llama_model_n_layer(self._model)
        self.n_swa: int = api.llama_model_n_swa(self._model)
        """The sliding window of layers that have one, in tokens; 0 without such layers."""
        name = ctypes.create_string_buffer(64)
        api.llama_model_meta_val_str(self._model, b"general.architecture", name, len(name))
        self._architecture = name.value.decode("utf-8", "replace")
        is_hybrid = api.llama_model_is_hybrid(self._model)
        self.is_recurrent = bool(is_hybrid or api.llama_model_is_recurrent(self._model))
        """Whether a sequence has a state that stands for all its tokens at once."""
        self.keeps_checkpoints = (
            self.is_recurrent and self._architecture not in OWN_STATE_ARCHITECTURES
        )
        """Whether it has a recurrent state, of a kind whose checkpoints were tried."""
        self._open_adapters()
        self._open_context()

    def _open_adapters(self) -> None:
        """llama.cpp makes room for them in the graphs of contexts that are opened later."""
        file = GgufFile.open(self.path) if self._lora or self._control_vectors else None
        self._control_vector = control_vector(self._control_vectors, file) if file else None
        for path, _ in self._lora:
            assert file is not None
            open_adapter(path, file)
            runtime.clear_log()
            adapter = api.llama_adapter_lora_init(self._model, os.fsencode(path))
            if not adapter:
                raise FileError(f"llama.cpp cannot load {path}: {runtime.reason()}")
            self._adapters.append(adapter)  # llama.cpp frees it with the model

    @property
    def usual_lora(self) -> tuple[float, ...]:
        """The scale of each adapter where a request gives none."""
        return tuple(scale for _, scale in self._lora)

    def adapt(self, scales: Sequence[float]) -> None:
        """Let each adapter act so strongly from the next pass on; 0: not at all. Cells computed
        with other scales are of no use to it. A change makes llama.cpp plan its graph again."""
        n = len(self._adapters)
        assert len(scales) == n
        if n:
            adapters = (api.llama_adapter_lora_p_ctypes * n)(*self._adapters)
            api.llama_set_adapters_lora(self._context, adapters, n, (ctypes.c_float * n)(*scales))

    def _open_context(self) -> None:
        options = self.options
        n_threads = options.n_threads or default_threads()
        in_ram = native.has_experts_in_ram(native.address(self._model))
        self._expert_kernels = native.expert_kernels() if in_ram else ""
        # Where they stay, a GPU does not take them for rounds.
        stay = in_ram and options.n_gpu_layers != 0 and native.keep_experts_at_home(n_threads)
        is_wide = stay and not options.exact
        n_verified = MAX_ROWS_AT_HOME if is_wide else MAX_OUTPUT_ROWS
        params = options.context_params(n_threads, n_verified)
        n_spare = self._n_spare_ids()
        first_spare = params.n_seq_max
        params.n_seq_max += n_spare
        runtime.clear_log()
        with self.own_kernels():
            self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise BackendError(
                f"llama.cpp has no room for a context of {options.n_ctx} tokens: "
                f"{runtime.reason()}; load with a smaller n_ctx or fewer GPU layers"
            )
        self._check_workers()
        self.adapt(self.usual_lora)
        self._steer()
        self.threads = self._shared_threads or native.ThreadPool(n_threads)
        self.threads.attach(native.address(self._context))
        # llama.cpp rounds up, but no more is promised than was asked for.
        self.n_ctx_all: int = min(options.n_ctx, api.llama_n_ctx(self._context))
        """The cells of all sequences together."""
        self.n_ctx: int = self.n_ctx_all // (options.n_seq if options.has_streams else 1)
        """The most cells of a sequence."""
        self.n_batch: int = api.llama_n_batch(self._context)
        self.n_threads = n_threads
        self._pass_threads = PassThreads(
            self._model, self._context, self.threads, options, n_threads, self.n_ctx
        )
        self.way_back = CELLS
        """Its way back, of those the options ask for."""
        if self.is_recurrent:
            self.way_back = possible(options.way_back, self._architecture, self._context)
        self.max_width = 1 + self.way_back.rows if self.is_recurrent else n_verified
        """The most rows of one sequence in a pass of which all but the first can be taken back."""
        # Otherwise llama.cpp may split a pass, and its graph does not see all rows.
        in_graph = not self.is_recurrent or self.way_back.rows > 0 or options.n_seq == 1
        self.needs_equal_rows = options.has_streams or (self.is_recurrent and in_graph)
        """Whether all sequences of a pass must have the same number of rows: llama.cpp would split
        any other."""
        self.wants_equal_rows = self.needs_equal_rows or options.n_gpu_layers != 0
        """Whether they should: llama.cpp builds its graph again where a row is another sequence's
        than in the pass before, and a GPU then launches each kernel by itself. Of eight sequences
        of an 8B target 33 rows took an H100 10.5 ms, and 6 with a graph that was there."""
        if options.tapped_layers and not in_graph:
            raise InputError(
                f"{self.path} is recurrent: its layers cannot be tapped for {options.n_seq} "
                "sequences at once; load it with one"
            )
        if options.heads:
            native.keep_states_of_all_rows(native.address(self._context))
        with self.own_kernels():
            self._pass = native.TargetPass(
                native.address(self._context),
                options.n_seq,
                list(options.tapped_layers),
                self.n_batch + options.n_seq * STORED_ROWS,
                in_graph,
                options.n_branches,
                self.way_back.by("replay"),
                self.threads,
            )
        if options.exact:
            self._pass.draw_alike()
        self._rollback = rollback(self.way_back, self.is_recurrent, options.n_seq, self._pass)
        self._cells = Cells(
            self._context,
            options.n_seq,
            options.n_branches,
            n_swa=self.n_swa,
            rollback=self._rollback,
            has_streams=options.has_streams,
            spare=range(first_spare, first_spare + n_spare if in_graph else 0),
        )

    def _steer(self) -> None:
        """Add the control vectors after their layers."""
        if self._control_vector is None:
            return
        values = np.ascontiguousarray(self._control_vector[1:])  # llama.cpp has none for layer 0
        data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        last = self.n_layer - 1
        if api.llama_set_adapter_cvec(self._context, data, values.size, self.n_embd, 1, last):
            raise BackendError(f"llama.cpp takes no control vector: {runtime.reason()}")

    def _n_spare_ids(self) -> int:
        """Ids with which the cells of several sequences are kept in order, so that answers depend
        on their own sequence alone; 0: they are not."""
        options = self.options
        if options.n_seq == 1 or options.has_streams or not self._may_round_alone():
            return 0
        if self.is_recurrent and not (
            options.way_back.by("replay") and api.llama_model_is_hybrid(self._model)
        ):
            return 0  # llama.cpp may put the rows of a pass into another order, or has no cells
        n_spare = SPARE_IDS if self.is_recurrent else 1
        fits = options.n_seq * options.n_branches + n_spare <= min(MAX_IDS, options.n_batch)
        return n_spare if fits else 0

    def _may_round_alone(self) -> bool:
        """On a GPU the rows beside a sequence's own decide, too."""
        options = self.options
        chains_on_cpu = options.n_branches == 1 and options.n_gpu_layers == 0
        return chains_on_cpu and not self.n_swa

    @property
    def rounds_alone(self) -> bool:
        """Whether a row rounds as its own sequence's cells make it, whatever other sequences do."""
        options = self.options
        is_alone = options.n_seq == 1 or options.has_streams or self._n_spare_ids() > 0
        return self._may_round_alone() and not self.is_recurrent and is_alone

    @property
    def is_open(self) -> bool:
        return bool(self._context)

    @property
    def lost(self) -> str:
        """The reason why a worker of this target, and so the target, is lost; else empty."""
        return next((worker.lost for worker in self._workers if worker.lost), "")

    def _check_workers(self) -> None:
        """Raises WorkerLostError if a worker was lost, so that the last results are not its own."""
        for worker in self._workers:
            worker.check()

    @property
    def address(self) -> int:
        """Address of the `llama_model`, for the native part."""
        self._check_open()
        return native.address(self._model)

    @property
    def context(self) -> Any:
        """The `llama_context_p`, for a drafter in a context beside it."""
        self._check_open()
        return self._context

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja text that its file has, or another that was put in its place."""
        self._check_open()
        raw = api.llama_model_chat_template(self._model, None)
        return raw.decode("utf-8", "replace") if raw else None

    def decode(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: Sequence[int] | NDArray[np.int32],
        seq_ids: Sequence[int] | NDArray[np.int32],
        output: Sequence[bool] | NDArray[np.bool_],
    ) -> None:
        """One batch of at most `n_batch` rows; row i is `tokens[i]` at `positions[i]`.

        `output` marks the rows whose logits are wanted. Positions of a sequence follow those that
        it has. Raises ContextFullError, with nothing changed, if the cache has no room, and
        BackendError if llama.cpp fails: the sequences of the batch should then be cleared.
        """
        self._check_size(len(tokens))
        self._pass_of(Batch(_list(tokens), _list(positions), _list(seq_ids), _list(output)))

    def run(self, batch: Batch) -> None:
        """`decode` for a batch whose parts may be draft trees, after which `keep` must follow."""
        self._check_size(len(batch))
        self._cells.tidy()
        self._pass_of(batch, self._cells.place(batch))

    def keep(self, part: Part, path: Sequence[int]) -> bool:
        """Keep only those rows of a part of the last batch that are in `path`.

        `path` numbers rows within the part, the anchor first. False: the sequence cannot forget the
        others, and nothing was done.
        """
        self._check_open()
        return self._cells.keep(part, path)

    def _pass_of(self, batch: Batch, ids: Sequence[Sequence[int]] = ()) -> None:
        n, seqs = len(batch), batch.seq_ids
        self._begin(n, max(batch.positions) + 1)
        status = self.native.decode(batch.tokens, batch.positions, seqs, batch.output, ids)
        self._check_workers()
        self._check_status(status, n)
        self._cells.after_pass(seqs)
        self._end(n, seqs, batch.positions)
        self._output = batch.output

    def _begin(self, n_rows: int, end: int, n_steps: int = 1) -> None:
        """Make ready for passes of so many rows each, whose positions are before `end`."""
        self._output, self.feature_rows = [], ()
        self._cells.before_pass(n_rows * n_steps)
        self._pass_threads.before_pass(n_rows, end)
        runtime.clear_log()
        self._rollback.begin_pass()

    def _end(self, n_rows: int, seq_ids: Sequence[int], positions: Sequence[int]) -> None:
        """Note the rows of the passes since `_begin`, and where they left their sequences."""
        self._rollback.end_pass(seq_ids, positions)
        first = self.native.first_stored
        self.feature_rows = range(first, first + n_rows)
        self.n_decoded = first + n_rows

    def decode_image(
        self, seq: int, begin: int, image: Embeddings, rows: range, n_positions: int
    ) -> None:
        """Decode rows of an image whose first position is `begin`, at most `n_batch` of them, those
        before having been decoded. It takes `n_positions` in all. Raises as `decode`."""
        n, end = len(rows), begin + n_positions
        self._check_size(n)
        self._cells.tidy()
        self._begin(n, end)
        span = slice(rows.start, rows.stop)
        positions = image.positions[:, span].ravel().tolist()
        embeddings = np.ascontiguousarray(image.rows[span])
        status = self.native.decode_embeddings(embeddings, positions, seq, image.is_causal)
        self._check_workers()
        self._check_status(status, n)
        self._cells.after_pass([seq] * n)
        if rows.stop == len(image.rows):
            self._cells.widen(seq, end, len(image.rows) - n_positions)
        # One row: none of an image can be taken back alone.
        self._end(n, [seq], [end - 1])
        self._output = [False] * n

    def n_cells(self, seq: int, length: int) -> int:
        """The number of cells of a sequence's first `length` positions: more than these with images
        of some targets."""
        return self._cells.n_cells(seq, length)

    def decode_ahead(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        n_steps: int,
        draws: Sequence[native.TokenDraw | None] = (),
        given: Sequence[int] = (),
    ) -> list[list[int]]:
        """Decode some sequences for `n_steps`. Each step is a batch with one row per sequence, and
        the token drawn after each row is the next row; or the token of `given`, in the order of the
        result, if it is not empty. `draws` says how each sequence draws, as for `draw`; if it is
        empty, all take the likeliest token.

        Returns the drawn tokens, [steps][sequences]. There are fewer steps if a sequence has come
        to an end of text, or to an id that is no token. Raises as `decode`.
        """
        self._check_open()
        n = len(tokens)
        draws = draws or [None] * n
        self._begin(n, max(positions) + n_steps, n_steps)
        status, found = self.native.decode_ahead(tokens, positions, seq_ids, n_steps, draws, given)
        self._check_workers()
        self._cells.after_pass(list(seq_ids) * (len(found) // n))
        self._check_status(status, n)
        more = len(found) // n - 1
        self._end(len(found), seq_ids, [position + more for position in positions])
        return [found[i : i + n] for i in range(0, len(found), n)]

    def shortest(self, seq: int) -> int:
        """The least length, besides 0, to which `truncate` can cut a sequence now."""
        self._check_open()
        return self._rollback.shortest(seq)

    def truncate(self, seq: int, length: int) -> bool:
        """Forget positions `length` and up. False: `length` is less than `shortest`, and nothing
        was done."""
        self._check_open()
        return self._cells.truncate(seq, length)

    def checkpoint(self, seq: int, length: int) -> StateCheckpoint:
        """A checkpoint to `restore` a sequence as it is now, with `length` tokens.

        Takes as many bytes of host memory as a recurrent state has. Raises MemoryError.
        """
        self._check_open()
        state = np.empty(0, np.uint8)
        if self.is_recurrent and length:
            self._rollback.wait()
            state = sequence_state.save(self._context, seq, state_only=True)
            self._check_workers()
        return StateCheckpoint(length, state)

    def restore(self, seq: int, checkpoint: StateCheckpoint) -> bool:
        """Cut a sequence back to a checkpoint of it. It must still begin with the same tokens.

        False: llama.cpp does not take the state, and the sequence is empty.
        """
        self._check_open()
        if not self.is_recurrent or not checkpoint.length:
            return self._cells.truncate(seq, checkpoint.length)
        self._rollback.wait()
        if not sequence_state.restore(self._context, seq, checkpoint.state, state_only=True):
            self._cells.clear(seq)
            return False
        self._rollback.restore(seq, checkpoint.length)
        return self._cells.truncate(seq, checkpoint.length)

    def tidy(self) -> None:
        """Do the first work of the next pass now, while the device is busy: edits of the cells of a
        tree, and replays of recurrent states."""
        self._check_open()
        self._cells.tidy(ahead=True)
        self._rollback.tidy()

    def sequence_bytes(self, seq: int) -> int:
        """The number of bytes that `save` would return."""
        return sequence_state.size_of(self._context, seq)

    def save(self, seq: int) -> NDArray[np.uint8]:
        """All cells and the state of a sequence, uint8 [n]; empty if llama.cpp cannot save.

        Raises MemoryError.
        """
        self._rollback.wait()
        state = sequence_state.save(self._context, seq)
        self._check_workers()
        return state

    def restore_saved(self, seq: int, state: NDArray[np.uint8], tokens: Sequence[int]) -> bool:
        """Replace a sequence by a saved one of these tokens. False: it does not fit, and the
        sequence is empty."""
        self._check_open()
        self._rollback.wait()
        if not self._cells.restore(seq, state, tokens):
            self._cells.clear(seq)
            return False
        self._rollback.restore(seq, len(tokens))
        return True

    def copy(
        self, source: int, target: int, length: int, checkpoint: StateCheckpoint | None = None
    ) -> bool:
        """Let sequence `target`, which is empty, share the first `length` positions of `source`.

        Without a `checkpoint` of `source` at that length, `can_copy` must hold: else InputError.
        False: llama.cpp does not take the checkpoint or, where sequences have cells of their own,
        the cells, and sequence `target` is empty. Raises MemoryError in the latter case.
        """
        if checkpoint is None and not self.can_copy(source, length):
            raise InputError(
                f"the first {length} tokens of sequence {source} cannot be shared now: its "
                "recurrent state stands for others"
            )
        if not self._cells.copy(source, target, length):
            return False
        return checkpoint is None or self.restore(target, checkpoint)

    def can_copy(self, seq: int, length: int) -> bool:
        """Whether another sequence can share the first `length` positions of this one now."""
        self._check_open()
        return self._rollback.can_copy(seq, length)

    def sees(self, seq: int, length: int) -> bool:
        """Whether a sequence of `length` tokens has all cells that the next token looks at.

        Cells behind a sliding window are reused, so they are missing once the sequence is rolled
        back.
        """
        self._check_open()
        return self._cells.sees(seq, length)

    def clear(self, seq: int) -> None:
        """Forget a sequence."""
        self._check_open()
        self._cells.clear(seq)

    def own_kernels(self) -> AbstractContextManager[None]:
        """Backends that are opened in it use `few_rows`, if there are any."""
        return self.few_rows.scope() if self.few_rows else nullcontext()

    def machine(self) -> dict[str, Any]:
        """All that decides how this target is computed here besides its file and options."""
        own: dict[str, Any] = {"kernels": self.few_rows.key} if self.few_rows else {}
        if self._expert_kernels:
            own["experts"] = self._expert_kernels
        return runtime.machine() | own | ({"rpc": list(self.options.rpc)} if self._workers else {})

    def attach(self, drafter: Closable) -> None:
        """Register a drafter that uses this model's tensors. It is closed before the model."""
        self._check_open()
        self._drafters.add(drafter)

    def reopen(self, options: TargetOptions) -> None:
        """Begin again with an empty context of these options. The weights stay where they are, and
        the drafters are closed. Raises BackendError if memory is short."""
        self._detach()()
        self.options = options
        self._output = []
        self._open_context()

    def close(self) -> None:
        """Free context and model, and close the drafters on it. Safe to call again."""
        self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        """`wait` for those that read the vocabulary; see `Vocabulary.close`."""
        free_context = self._detach()
        model, self._model = self._model, None
        free = partial(_free, free_context, model)
        if model and hasattr(self, "vocabulary"):
            self.vocabulary.close(free, wait=wait)
        else:
            free()

    def _detach(self) -> Callable[[], None]:
        """Close the drafters and let go of the context. Returns the function that frees it."""
        for drafter in list(self._drafters):
            drafter.close()
        if self._pass is not None:
            with suppress(BackendError):  # states that nobody will read
                self._pass.wait()
        context, self._context = self._context, None
        parts, self._pass, self.threads = [self._pass, self.threads], None, None
        return partial(_free_context, context, parts)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._close(wait=False)

    def _check_size(self, n: int) -> None:
        self._check_open()
        if not 0 < n <= self.n_batch:
            raise InputError(f"a batch of {n} rows; expected 1 to {self.n_batch}")

    def _check_status(self, status: int, n: int) -> None:
        if status == _NO_SLOT:
            raise ContextFullError(
                f"no room for {n} more tokens in a context of {self.n_ctx}; "
                "load with a larger n_ctx or give a shorter prompt"
            )
        if status != 0:
            raise BackendError(f"llama_decode failed on {n} rows with {status}: {runtime.reason()}")


def _free_context(context: Any, parts: list[Any]) -> None:
    """`parts` are freed after the context, whose graph they are part of."""
    if context:
        api.llama_free(context)
    parts.clear()


def _free(free_context: Callable[[], None], model: Any) -> None:
    free_context()
    if model:
        api.llama_model_free(model)
        give_back_memory()


def _list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
