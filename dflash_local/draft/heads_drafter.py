"""The heads of a target's own file as a drafter: layers that predict further tokens (MTP)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.draft.growing import GrowingDraft
from dflash_local.errors import BackendError, ClosedError, ContextFullError, InputError
from dflash_local.fit.architectures import CELLS
from dflash_local.gguf.drafter_spec import AssistantSpec, HeadsSpec
from dflash_local.llama import native, runtime
from dflash_local.llama.runtime import api
from dflash_local.target_model import sequence_state
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.pass_threads import PassThreads
from dflash_local.target_model.taps import Features, StoredFeatures
from dflash_local.target_model.target import Target

LEAST_CHANCE = 0.1
"""A draft ends where its chance, all of it together, is less: a step of a head takes about a tenth
of a pass of the target, most of it the output head's."""

States = NDArray[np.float32]
"""Hidden states of the target, or of a head, [n, n_embd]."""


@dataclass
class _Text:
    """The heads' part of a sequence: `length` rows, and the target's last hidden state,
    [n_embd], which comes with the next token. It is 0 at the beginning, and where it is lost
    because the text was cut."""

    state: States
    length: int = 0


@dataclass(frozen=True)
class Rows:
    """Rows of a sequence: tokens from position `begin` on, and the state before each of them,
    [n, n_embd]."""

    seq: int
    begin: int
    tokens: list[int]
    states: States


class HeadsDrafter(Drafter):
    """Drafts with a target's heads, in llama.cpp's own context for them. A head reads a token and
    the target's hidden state before it. To go on, it reads its own token and its own state.

    The method is that of DeepSeek-V3 (2024, arXiv 2412.19437), as llama-server's `draft-mtp`.
    """

    name = "the target's heads"
    saves_rows = by_steps = True

    _context: Any = None
    _pass: native.TargetPass | None = None

    def __init__(self, target: Target, spec: HeadsSpec, *, n_seq: int, n_ctx: int) -> None:
        """Raises BackendError if the memory does not suffice."""
        self.file_key = [*target.file_key, "heads"]
        n_ctx += n_seq * spec.block_size
        options = replace(
            target.options, n_ctx=n_ctx, n_seq=n_seq, n_branches=1, way_back=CELLS, exact=False
        )
        self._open_on(target, spec, ctypes.c_void_p(target.address), options)

    def _open_on(
        self,
        target: Target,
        spec: HeadsSpec | AssistantSpec,
        model: Any,
        options: TargetOptions,
        beside: Any = None,
    ) -> None:
        """Open the context of heads in `model`, beside the context whose cells they read, if any.
        It is closed with the target."""
        self._spec, self._target = spec, target
        target.attach(self)
        params = options.context_params(target.n_threads)
        params.ctx_type, params.ctx_other = api.LLAMA_CONTEXT_TYPE_MTP, beside
        runtime.clear_log()
        with target.own_kernels():
            self._context = api.llama_init_from_model(model, params)
        if not self._context:
            self.close()
            raise BackendError(f"llama.cpp has no room for the heads: {runtime.reason()}")
        try:
            address = native.address(self._context)
            target.threads.attach(address)
            self._n_batch = api.llama_n_batch(self._context)
            with target.own_kernels():
                layers, threads = [api.llama_model_n_layer(model)], target.threads
                self._pass = native.TargetPass(
                    address, options.n_seq, layers, self._n_batch, in_graph=True, threads=threads
                )
        except BaseException:
            self.close()
            raise
        at, n_threads = ctypes.c_void_p(target.address), target.n_threads
        self._pass_threads = PassThreads(
            at, self._context, target.threads, options, n_threads, options.n_ctx
        )
        self._memory = api.llama_get_memory(self._context)
        self._texts = [_Text(self._no_state) for _ in range(options.n_seq)]

    @property
    def _no_state(self) -> States:
        return np.zeros(self._target.n_embd, np.float32)

    @property
    def block_size(self) -> int:
        return self._spec.block_size

    def length(self, seq: int) -> int:
        return self._texts[seq].length

    def inject(self, seq: int, features: Features) -> None:
        tokens, states = _read(features)
        for begin in range(0, len(tokens), self._n_batch):
            part = slice(begin, begin + self._n_batch)
            self._decode([self._next(seq, tokens[part], states[part])])
            self._take(seq, states[part])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        read = [_read(request.features) for request in requests]
        if sum(1 + len(tokens) for tokens, _ in read) > self._n_batch:
            for request in requests:
                self.inject(request.seq, request.features)
            read = [([], states[:0]) for _, states in read]
        rows = []
        for request, (tokens, states) in zip(requests, read, strict=True):
            rows.append(self._next(request.seq, [*tokens, request.anchor], states))
            self._take(request.seq, states)
        drafts = [GrowingDraft(request, LEAST_CHANCE) for request in requests]
        going = list(range(len(requests)))
        while going:
            self._decode([rows[i] for i in going], output=True)
            for row, i in enumerate(list(going)):
                token = drafts[i].draw(self._open, row)
                rows[i] = self._after(rows[i], token, self._states[row : row + 1])
                if drafts[i].is_done(self._target.vocabulary):
                    going.remove(i)
        for request in requests:
            self._remove(request.seq, self._texts[request.seq].length)
        return [each.draft() for each in drafts]

    def truncate(self, seq: int, length: int) -> None:
        text = self._texts[seq]
        if length < text.length or not length:
            self._remove(seq, length)
            self._texts[seq] = _Text(self._no_state, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self.truncate(target, 0)
        api.llama_memory_seq_cp(self._memory, source, target, 0, length)
        known = self._texts[source]
        state = known.state if length == known.length else self._no_state
        self._texts[target] = _Text(state, length)

    def save(self, seq: int) -> NDArray[np.uint8]:
        text = self._texts[seq]
        length = np.asarray([text.length], np.int32).view(np.uint8)
        cells = sequence_state.save(self._context, seq)
        return np.concatenate([length, text.state.view(np.uint8), cells])

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        self.truncate(seq, 0)
        n = 4 + 4 * self._target.n_embd
        if not sequence_state.restore(self._context, seq, np.ascontiguousarray(saved[n:])):
            raise ContextFullError("what the heads knew of a text does not fit their context")
        length, state = saved[:4].view(np.int32), saved[4:n].view(np.float32)
        self._texts[seq] = _Text(state.copy(), int(length[0]))

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            api.llama_free(context)
        self._pass = None  # after the context, whose graph it is part of

    @property
    def _open(self) -> native.TargetPass:
        if self._pass is None:
            raise ClosedError("this drafter is closed; load it again")
        return self._pass

    def _next(self, seq: int, tokens: list[int], states: States) -> Rows:
        """The rows of the next tokens. `states` are the target's, of the tokens themselves."""
        text = self._texts[seq]
        before = np.concatenate([text.state[None], states])[: len(tokens)]
        return Rows(seq, text.length, tokens, before)

    def _after(self, rows: Rows, token: int, states: States) -> Rows:
        """The row of a drafted token, and the head's own state before it."""
        return Rows(rows.seq, rows.begin + len(rows.tokens), [token], states)

    def _take(self, seq: int, states: States) -> None:
        """Note that rows stay, after which the target had these states."""
        text = self._texts[seq]
        text.length += len(states)
        if len(states):
            text.state = states[-1].copy()

    def _decode(self, parts: Sequence[Rows], *, output: bool = False) -> None:
        """One pass. With `output`, of the last row of each part there are logits, and the states of
        the head in `_states`, [parts, n_embd]."""
        tokens = [token for part in parts for token in part.tokens]
        positions = [part.begin + i for part in parts for i in range(len(part.tokens))]
        seqs = [part.seq for part in parts for _ in part.tokens]
        last = [output and i == 0 for part in parts for i in reversed(range(len(part.tokens)))]
        states = np.concatenate([part.states for part in parts])
        runtime.clear_log()
        self._pass_threads.before_pass(len(tokens), max(positions) + 1)
        status = self._open.decode(tokens, positions, seqs, last, (), states)
        if status == 1:
            raise ContextFullError(f"the heads have no room for {len(tokens)} more tokens")
        if status:
            raise BackendError(f"llama.cpp failed on the heads with {status}: {runtime.reason()}")
        if output:
            first, n_tapped = self._open.first_stored, self._open.n_tapped
            ends = [row for row, is_last in enumerate(last) if is_last]
            if n_tapped < len(last):  # these heads only go on with the rows that have an output
                ends = list(range(n_tapped))
            self._states = self._open.hidden_states([first + row for row in ends])

    def _remove(self, seq: int, length: int) -> None:
        """Free the cells from `length` on."""
        api.llama_memory_seq_rm(self._memory, seq, length, -1)


def _read(features: Features) -> tuple[list[int], States]:
    """The tokens, and the target's states after them, [n, n_embd]."""
    if not isinstance(features, StoredFeatures):
        raise InputError("heads read tokens, too, and these are features alone")
    return list(features.tokens), np.asarray(features, np.float32)
