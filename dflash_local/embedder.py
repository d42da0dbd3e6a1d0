"""Vectors and scores of texts: a GGUF embedding model or reranker in a llama.cpp context."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.chat.quoting import quoted, tokenized
from dflash_local.errors import BackendError, ClosedError, FileError, InputError, PromptTooLongError
from dflash_local.fit.architectures import EMBEDDING_ARCHITECTURES
from dflash_local.fit.footprint import size_text
from dflash_local.fit.options import NONE, POOLINGS, LoadOptions, Pooling
from dflash_local.fit.pairing import check_embedder, pooling_of
from dflash_local.fit.plan import Plan, make_plan
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import native, runtime
from dflash_local.llama.host import default_threads, give_back_memory
from dflash_local.llama.runtime import api
from dflash_local.pairs.find import find_pair
from dflash_local.printable import silent, to_stderr
from dflash_local.result import ModelStatus
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.vocabulary import Vocabulary
from dflash_local.trial.model import ensure_loadable

if TYPE_CHECKING:
    from dflash_local.llama.runtime import Device

Vector = NDArray[np.float32]
Text = str | Sequence[str | int]
"""A text, token ids, or texts and ids in a row."""

USUAL_CONTEXT = 4096
"""The most tokens of a text, if none are given: longer ones take memory, and are mostly cut into
pieces before they are embedded."""
_MOST_TEXTS = 32
"""Of a pass."""
_PASS_ROWS = 512
"""Tokens of a pass of several texts: each token looks at all of them, and most are masked out."""
_RERANK_TEMPLATE = "tokenizer.chat_template.rerank"


def load_embedder(
    model: str | os.PathLike[str],
    *,
    pooling: Pooling | None = None,
    n_ctx: int | None = None,
    n_gpu_layers: int | None = None,
    n_threads: int | None = None,
    split_mode: str = "layer",
    main_gpu: int = 0,
    tensor_split: Sequence[float] | None = None,
    quiet: bool = False,
    say: Callable[[str], None] | None = None,
) -> Embedder:
    """Load a GGUF embedding model or reranker: a file, a folder that holds one, or a place on the
    hub, such as `owner/repo:Q8_0`.

    `pooling` is "mean", "cls", "last" or "none" for vectors, "rank" for scores; None is what the
    file says. `n_ctx` is the most tokens of a text: None is what the model was trained on, at most
    4096. The others are those of `load`.

    Raises FileError for bad files, InputError for one that does not fit the memory or that writes
    text, unless `pooling` says how to use it, BackendError if llama.cpp fails.
    """
    options = LoadOptions(
        n_ctx=n_ctx,
        n_gpu_layers=n_gpu_layers,
        n_threads=n_threads,
        split_mode=split_mode,
        main_gpu=main_gpu,
        tensor_split=tensor_split,
    )
    say = say or (silent if quiet else to_stderr)
    file = GgufFile.open(find_pair(model, NONE, say=say, options=options).target)
    pooling = pooling or pooling_of(file)
    if pooling is None:
        raise InputError(
            f"{file.name} writes text, and its file names no pooling; give an embedding model, or "
            "pooling='last' to take the vector of a text's last token"
        )
    plan = plan_embedder(file, pooling, options, runtime.devices())
    say(f"{file.name}: {size_text(plan.target_bytes)}, texts of up to {plan.n_ctx} tokens")
    ensure_loadable(
        file.path,
        None,
        layers=(),
        n_gpu_layers=plan.n_gpu_layers,
        pooling=POOLINGS.index(pooling),
        say=say,
    )
    return Embedder(file, pooling, plan, options)


def plan_embedder(
    file: GgufFile, pooling: Pooling, options: LoadOptions, devices: Sequence[Device]
) -> Plan:
    """The plan for loading it on a machine with `devices`. Raises FileError, InputError."""
    check_embedder(file, pooling)
    trained = file.require(f"{file.architecture}.context_length", int)
    n_ctx = min(options.n_ctx or USUAL_CONTEXT, trained)
    wanted = replace(options, n_ctx=max(n_ctx, 16), n_batch=max(n_ctx, 16))
    plan = make_plan(file, None, None, wanted, devices)
    return replace(plan, n_ctx=n_ctx, n_batch=n_ctx)


class Embedder:
    """A loaded model that makes vectors or scores of texts. Any thread may use it; passes run one
    after the other. Close it, or use it as a context manager."""

    def __init__(self, file: GgufFile, pooling: Pooling, plan: Plan, options: LoadOptions) -> None:
        """The file must have passed a trial: llama.cpp itself aborts on some bad files. Raises
        FileError, BackendError."""
        runtime.init()
        self.path = file.path
        self.plan = plan
        self.pooling = pooling
        self.n_ctx = plan.n_ctx
        """The most tokens of a text."""
        self._template = file.get(_RERANK_TEMPLATE)
        self._lock = threading.Lock()
        self._n_running = self._n_passes = self._n_texts = self._n_tokens = self._longest = 0
        self._pass_s = 0.0
        self._context: Any = None
        placing = TargetOptions(
            n_ctx=plan.n_cells,
            n_gpu_layers=plan.n_gpu_layers,
            split_mode=options.split_mode,
            main_gpu=options.main_gpu,
            tensor_split=plan.tensor_split,
        )
        runtime.clear_log()
        self._model: Any = api.llama_model_load_from_file(
            os.fsencode(file.path), placing.model_params()
        )
        if not self._model:
            raise FileError(f"llama.cpp cannot load {file.path}: {runtime.reason()}")
        self.vocabulary = Vocabulary(api.llama_model_get_vocab(self._model))
        self._texts = min(_MOST_TEXTS, plan.n_batch)
        n_threads = options.n_threads or default_threads()
        runtime.clear_log()
        self._context = api.llama_init_from_model(
            self._model, _context_params(file, pooling, plan, self._texts, n_threads)
        )
        if not self._context:
            reason = runtime.reason()
            self.close()
            raise BackendError(
                f"llama.cpp has no room for texts of {plan.n_ctx} tokens: {reason}; load with a "
                "smaller n_ctx"
            )
        self._threads: Any = native.ThreadPool(n_threads)
        self._threads.attach(native.address(self._context))
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(plan.n_batch, 0, 1)
        self._width: int = api.llama_model_n_embd_out(self._model)

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self.vocabulary.n_tokens

    @property
    def dimensions(self) -> int:
        """Numbers of a vector."""
        return 1 if self.pooling == "rank" else self._width

    def embed(
        self, texts: str | Sequence[Text], *, normalize: bool = True, truncate: bool = False
    ) -> Vector:
        """A vector for each text: (n, dimensions), of length 1 unless `normalize` is off.

        A text may be given as token ids, too. `truncate` leaves out the end of one that is too
        long. Raises PromptTooLongError for such a one, InputError for an empty one and for a
        reranker.
        """
        self._check_use("vectors", self.pooling != "rank", "rerank gives its scores")
        self._check_use("one vector of a text", self.pooling != "none", "load it with a pooling")
        given = [texts] if isinstance(texts, str) else texts
        prompts = [self.tokens(text, truncate=truncate) for text in given]
        vectors = [vector for batch in self.batches(prompts) for vector in self.run(batch)]
        found = np.stack(vectors) if vectors else np.empty((0, self.dimensions), np.float32)
        return normalized(found) if normalize else found

    def rerank(self, query: str, documents: Sequence[str]) -> Vector:
        """A score for each document, (n,), higher where it answers the query better. Their range is
        the model's. Raises as `embed`, and InputError for no reranker."""
        self._check_use("scores", self.pooling == "rank", "give a reranker")
        prompts = [self.pair_tokens(query, document) for document in documents]
        scores = [float(score) for batch in self.batches(prompts) for (score,) in self.run(batch)]
        return np.array(scores, np.float32)

    def tokens(self, text: Text, *, truncate: bool = False) -> list[int]:
        """Token ids of a text, with those that the model wants around it. Raises as `embed`."""
        pieces = [text] if isinstance(text, str) else list(text)
        begins = bool(pieces) and isinstance(pieces[0], str)
        start, end = self.vocabulary.edges() if begins else ([], [])
        found = [*start]
        for piece in pieces:
            if isinstance(piece, str):
                found += self._text_tokens(piece, truncate)
            else:
                self.vocabulary.piece(piece)  # refuses what is no token
                found.append(piece)
        found += end
        if truncate and len(found) > self.n_ctx:
            found = found[: self.n_ctx - len(end)] + end
        return self._checked(found)

    def pair_tokens(self, query: str, document: str) -> list[int]:
        """Token ids of a query with a document, as the reranker reads them. Raises as `embed`."""
        try:
            if not isinstance(self._template, str):
                pair = self.vocabulary.paired(query, document, n_ctx=self.n_ctx)
            else:
                parts = {"{query}": query, "{document}": document}
                prompt = "".join(
                    quoted(parts[part], self.vocabulary) if part in parts else part
                    for part in re.split(r"(\{query\}|\{document\})", self._template)
                )
                pair = tokenized(prompt, self.vocabulary, self.n_ctx)
        except PromptTooLongError as error:
            raise self._too_long(error.n_prompt_tokens, at_least=True) from None
        return self._checked(pair)

    def batches(self, prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
        """`prompts`, cut into the batches of one pass each."""
        batch: list[list[int]] = []
        for prompt in prompts:
            n_rows = sum(map(len, batch)) + len(prompt)
            if batch and (len(batch) == self._texts or n_rows > min(_PASS_ROWS, self.n_ctx)):
                yield batch
                batch = []
            batch.append(prompt)
        if batch:
            yield batch

    def run(self, batch: Sequence[Sequence[int]]) -> list[Vector]:
        """One pass over a batch of `batches`: for each prompt its vector, its score as a vector of
        one, or with pooling "none" a vector for each token, (tokens, dimensions)."""
        self._n_running += 1
        try:
            with self._lock:
                return self._run(batch)
        finally:
            self._n_running -= 1

    def _run(self, batch: Sequence[Sequence[int]]) -> list[Vector]:
        if self._context is None:
            raise ClosedError("this model is closed; load it again")
        begin = time.perf_counter()
        n = self._fill(batch)
        runtime.clear_log()
        if self._memory:
            api.llama_memory_clear(self._memory, False)
        run = api.llama_decode if self._memory else api.llama_encode
        if status := run(self._context, self._batch):
            raise BackendError(f"llama.cpp failed at an embedding ({status}): {runtime.reason()}")
        found = list(self._read(batch))
        if not all(np.isfinite(vector).all() for vector in found):
            raise BackendError(f"{self.path.name} gives no numbers for this text")
        self._n_passes += 1
        self._n_texts += len(batch)
        self._n_tokens += n
        self._longest = max(self._longest, *map(len, batch))
        self._pass_s += time.perf_counter() - begin
        return found

    def _fill(self, batch: Sequence[Sequence[int]]) -> int:
        rows = [(seq, at, token) for seq, ids in enumerate(batch) for at, token in enumerate(ids)]
        assert 0 < len(rows) <= self.plan.n_batch, "batches are cut"
        for row, (seq, at, token) in enumerate(rows):
            self._batch.token[row], self._batch.pos[row] = token, at
            self._batch.n_seq_id[row], self._batch.seq_id[row][0] = 1, seq
            self._batch.logits[row] = True
        self._batch.n_tokens = len(rows)
        return len(rows)

    def _read(self, batch: Sequence[Sequence[int]]) -> Iterator[Vector]:
        row = 0
        for seq, ids in enumerate(batch):
            if self.pooling == "none":
                places = range(row, row + len(ids))
                yield np.stack(
                    [self._vector(api.llama_get_embeddings_ith(self._context, i)) for i in places]
                )
            else:
                yield self._vector(api.llama_get_embeddings_seq(self._context, seq))
            row += len(ids)

    def _vector(self, pointer: Any) -> Vector:
        if not pointer:
            raise BackendError(f"llama.cpp made no embedding: {runtime.reason()}")
        found: Vector = np.ctypeslib.as_array(pointer, (self.dimensions,)).copy()
        return found

    def _text_tokens(self, text: str, truncate: bool) -> list[int]:
        if truncate:  # no token is longer
            text = text[: self.n_ctx * self.vocabulary.longest]
        try:
            return self.vocabulary.tokenize(
                text, add_special=False, n_ctx=None if truncate else self.n_ctx
            )
        except PromptTooLongError as error:
            raise self._too_long(error.n_prompt_tokens, at_least=True) from None

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise InputError("the input is empty; give a text")
        if len(tokens) > self.n_ctx:
            raise self._too_long(len(tokens))
        return tokens

    def _too_long(self, n_tokens: int, *, at_least: bool = False) -> PromptTooLongError:
        return PromptTooLongError(
            f"the input is too large: {'at least ' * at_least}{n_tokens} tokens, and "
            f"{self.path.name} reads at most {self.n_ctx} of a text; cut it into parts",
            n_tokens,
            self.n_ctx,
            at_least=at_least,
        )

    def _check_use(self, wanted: str, is_made: bool, advice: str) -> None:
        if not is_made:
            raise InputError(
                f"{self.path.name} is used with pooling {self.pooling!r}, which gives no {wanted}; "
                f"{advice}"
            )

    def status(self) -> ModelStatus:
        """Its counts, as of a model that writes text."""
        return ModelStatus(
            requests=self._n_texts,
            prompt_tokens=self._n_tokens,
            prompt_s=self._pass_s,
            passes=self._n_passes,
            slots_in_passes=self._n_texts,
            n_slots=1,
            n_busy=min(self._n_running, 1),
            n_waiting=max(self._n_running - 1, 0),
            slots=(),
            n_ctx=self.n_ctx,
            cells_used=0,
            longest=self._longest,
            cache_bytes=0,
        )

    def close(self) -> None:
        """Free everything, once the pass that runs has ended. Safe to call again."""
        with self._lock:
            self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        context, self._context = self._context, None
        model, self._model = self._model, None
        if context is not None:
            api.llama_free(context)
            api.llama_batch_free(self._batch)
            self._threads = None
        if model is not None:
            self.vocabulary.close(partial(_free, model), wait=wait)

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._close(wait=False)

    def __repr__(self) -> str:
        return f"<Embedder {self.path.name}, {self.pooling}, {self.dimensions} dimensions>"


def normalized(vectors: Vector, norm: int = 2) -> Vector:
    """`vectors` (n, dimensions), each divided by its norm of that order, as llama.cpp's
    `common_embd_normalize` has it: 2 is the euclidean one, 0 the largest number over 32760, -1
    none. A vector of zeros stays so."""
    if norm < 0:
        return vectors
    lengths = np.linalg.norm(vectors.astype(np.float64), norm or np.inf, axis=-1, keepdims=True)
    if norm == 0:
        lengths /= 32760
    scaled: Vector = np.zeros_like(vectors)
    np.divide(vectors, lengths, out=scaled, where=lengths > 0, casting="same_kind")
    return scaled


def _context_params(
    file: GgufFile, pooling: Pooling, plan: Plan, n_texts: int, n_threads: int
) -> Any:
    params = api.llama_context_default_params()
    params.n_ctx = plan.n_cells
    params.n_batch = plan.n_batch
    # Where tokens see only earlier ones, and the last one counts, a text may be read in parts.
    causal = file.architecture not in EMBEDDING_ARCHITECTURES and file.get(
        f"{file.architecture}.attention.causal", True
    )
    in_parts = causal and pooling in ("last", "rank")
    params.n_ubatch = min(plan.n_batch, _PASS_ROWS) if in_parts else plan.n_batch
    params.n_seq_max = n_texts
    params.n_outputs_max = params.n_outputs_max_per_seq = plan.n_batch
    params.kv_unified = True
    params.embeddings = True
    params.pooling_type = POOLINGS.index(pooling)
    params.n_threads = params.n_threads_batch = n_threads
    params.no_perf = True
    return params


def _free(model: Any) -> None:
    api.llama_model_free(model)
    give_back_memory()
