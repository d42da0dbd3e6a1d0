"""Many texts of a target at once, without a drafter, and then their features in wide passes.

A drafter that knows nothing cannot speed its teacher up. So texts are written in a context of their
own, in which each has its own stream of cells, by one row each in a pass. The pass that reads whole
texts afterwards costs little beside that.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_local.errors import BackendError, NotFiniteError
from dflash_local.llama import native, runtime
from dflash_local.llama.runtime import api
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.target import Target
from dflash_local_tune.answers import LEAST_ANSWER, N_LABELS, Answer

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """A text to write: its beginning, its temperature (0: greedy), and the most tokens.
    `is_prompt`: it becomes the prompt of another text, and its own answer teaches nothing.
    `answer`: it is written already."""

    prompt: list[int]
    temperature: float = 0.0
    max_tokens: int = 256
    is_prompt: bool = False
    answer: list[int] | None = None


@dataclass
class Text:
    """A text that was written, `tokens` from the prompt on."""

    asked: Asked
    seq: int
    tokens: list[int] = field(default_factory=list)
    has_ended: bool = False
    """The target ended it itself."""
    label_ids: Tensor | None = None
    label_probs: Tensor | None = None

    @property
    def n_written(self) -> int:
        return len(self.tokens) - len(self.asked.prompt)


class Writer:
    """Writes `n_seq` texts at once, each of at most `n_ctx` tokens, `max_tokens` of them its own.

    It has a context of its own on the target's model. `on_prompt` gets the texts that are prompts.
    Hidden states are kept in `dtype` on `keep_on`.
    """

    def __init__(
        self,
        target: Target,
        n_seq: int,
        n_ctx: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: str,
        on_prompt: Callable[[Text], None],
        seed: int = 0,
    ) -> None:
        self._target = target
        self._n_seq = n_seq
        self._n_ctx = n_ctx
        self._dtype = dtype
        self.keep_on = "cpu"
        self._device = device
        self._on_prompt = on_prompt
        self._stream: torch.cuda.Stream | None = None
        if device == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(device).manual_seed(seed)
        self._ids = torch.zeros(n_seq, max_tokens, N_LABELS, dtype=torch.int32, device=device)
        self._probs = torch.zeros(n_seq, max_tokens, N_LABELS, device=device)
        # Of each sequence, in arrays: a pass has hundreds of them.
        self._tokens = np.zeros((n_seq, n_ctx), np.int64)
        self._n_tokens, self._n_fed, self._n_prompt, self._end_at = np.zeros((4, n_seq), np.int64)
        self._hot = np.zeros(n_seq, np.float32)
        self._is_last = np.zeros(target.n_vocab, bool)
        self._is_last[target.vocabulary.ends] = True
        self._open()

    def _open(self) -> None:
        target = self._target
        params = target.options.context_params(target.n_threads)
        params.n_ctx = self._n_seq * self._n_ctx
        self._n_batch = max(self._n_seq, min(self._n_ctx, 2048))
        params.n_batch = params.n_ubatch = self._n_batch
        params.n_seq_max = params.n_outputs_max = self._n_seq
        params.n_outputs_max_per_seq = 1
        params.kv_unified = False
        runtime.clear_log()
        self._context = api.llama_init_from_model(target._model, params)
        if not self._context:
            raise BackendError(
                f"llama.cpp has no room to write {self._n_seq} texts of {self._n_ctx} tokens: "
                f"{runtime.reason()}; give a smaller --ctx"
            )
        self._rows = _Rows(self._n_batch)
        self._memory = api.llama_get_memory(self._context)
        target.threads.attach(native.address(self._context))

    def close(self) -> None:
        """Free the context. Safe to call again."""
        context, self._context = self._context, None
        if context:
            api.llama_free(context)

    # Answers

    def answers(self, asked: Iterator[Asked]) -> Iterator[Answer]:
        """The answers as they end, not in the order of their prompts."""
        done: list[Text] = []
        n_rows = 0
        for text in self.texts(asked):
            if text.asked.is_prompt:
                self._on_prompt(text)
            elif text.n_written >= LEAST_ANSWER:
                if n_rows + len(text.tokens) > self._target.n_batch:
                    yield from self.read(done)
                    done, n_rows = [], 0
                done.append(text)
                n_rows += len(text.tokens)
        yield from self.read(done)

    def pause(self) -> None:
        """Nothing is kept between two calls; another answerer has to empty caches."""

    def read(self, texts: Sequence[Text]) -> Iterator[Answer]:
        """The answers of whole texts, with the features of their tokens."""
        target, waiting = self._target, deque(texts)
        n_seq = 1 if target.is_recurrent else target.options.n_seq
        while waiting:
            batch = Batch()
            taken: list[Text] = []
            while waiting and len(taken) < n_seq:
                n = len(waiting[0].tokens) - 1
                if taken and len(batch) + n > target.n_batch:
                    break
                taken.append(waiting.popleft())
                batch.add(len(taken) - 1, 0, taken[-1].tokens[:-1], outputs="none")
            target.decode(batch.tokens, batch.positions, batch.seq_ids, batch.output)
            rows = torch.from_numpy(target.stored(target.feature_rows)).to(
                self.keep_on, self._dtype
            )
            found = [
                self._answer(text, rows[part.first_row : part.first_row + part.n_rows])
                for part, text in zip(batch.parts, taken, strict=True)
            ]
            for part in batch.parts:
                target.clear(part.seq)
            yield from found

    @staticmethod
    def _answer(text: Text, features: Tensor) -> Answer:
        assert text.label_ids is not None and text.label_probs is not None
        return Answer(
            torch.tensor(text.tokens),
            len(text.asked.prompt),
            features.clone(),  # else one answer would keep the rows of all
            text.label_ids,
            text.label_probs,
        )

    # Writing

    def texts(self, asked: Iterator[Asked]) -> Iterator[Text]:
        """Texts as they end, without features. A new one takes the place of each at once: a pass of
        the same rows as the last one needs no new graph, and one without gaps between the numbers
        of its sequences is not split."""
        free = list(range(self._n_seq))
        running: dict[int, Text] = {}
        more = True
        try:
            while more or running:
                while more and free:
                    found = next(asked, None)
                    more = found is not None
                    if found is not None and found.answer is not None:
                        yield _given(found, found.answer[: self._n_ctx - len(found.prompt)])
                    elif found is not None:
                        text = Text(found, free.pop())
                        running[text.seq] = text
                        self._begin(text)
                for seq in self._step(np.array(sorted(running))) if running else ():
                    free.append(seq)
                    yield self._end(running.pop(seq))
        finally:
            if self._context:
                api.llama_memory_clear(self._memory, False)

    def _begin(self, text: Text) -> None:
        """Decode a long prompt by itself. A shorter one costs less in the rows of the steps."""
        seq, prompt = text.seq, text.asked.prompt
        self._tokens[seq, : len(prompt)] = prompt
        self._n_tokens[seq] = self._n_prompt[seq] = len(prompt)
        self._end_at[seq] = min(len(prompt) + text.asked.max_tokens, self._n_ctx)
        self._hot[seq] = text.asked.temperature
        n = len(prompt) - 1
        self._n_fed[seq] = n if n > self._n_seq else 0
        for begin in range(0, self._n_fed[seq], self._n_batch):
            places = np.arange(begin, min(n, begin + self._n_batch))
            self._decode(self._tokens[seq, places], places, np.full(len(places), seq), 0)

    def _step(self, seqs: Ints) -> list[int]:
        """One row of each sequence; those that are through their prompt get a token. Those that
        have ended then."""
        places = self._n_fed[seqs]
        self._decode(self._tokens[seqs, places], places, seqs, 1)
        self._n_fed[seqs] += 1
        rows = np.flatnonzero(self._n_fed[seqs] == self._n_tokens[seqs])
        if not len(rows):
            return []
        with self._apart():
            drawn = self._draw(seqs[rows], rows, len(seqs))
        seqs = seqs[rows]
        self._tokens[seqs, self._n_tokens[seqs]] = drawn
        self._n_tokens[seqs] += 1
        is_over = self._is_last[drawn] | (self._n_tokens[seqs] >= self._end_at[seqs])
        ended: list[int] = seqs[is_over].tolist()
        return ended

    def _draw(self, seqs: Ints, rows: Ints, n: int) -> Ints:
        """A token for each sequence from its row of the last pass, which had `n`, and the labels of
        its place."""
        device = self._device
        pointer = api.llama_get_logits(self._context)
        values = np.ctypeslib.as_array(pointer, (n * self._target.n_vocab,)).reshape(n, -1)
        logits = torch.from_numpy(values).to(device)
        numbers = np.stack([rows, seqs, self._n_tokens[seqs] - self._n_prompt[seqs]])
        at_rows, at_seqs, at = torch.from_numpy(numbers).to(device)
        if len(rows) < n:
            logits = logits[at_rows]
        hot = torch.from_numpy(self._hot[seqs]).to(device)[:, None]
        top, ids = logits.topk(N_LABELS)
        # A greedy answer's labels are the target's own distribution.
        scale = torch.where(hot > 0, hot, 1.0)
        self._ids[at_seqs, at] = ids.to(torch.int32)
        self._probs[at_seqs, at] = (top / scale).softmax(dim=-1)
        noise = torch.empty_like(logits).exponential_(generator=self._generator).log_()
        drawn = (logits / scale - noise * (hot > 0)).argmax(dim=-1)
        found: Ints = torch.where(top[:, 0].isfinite(), drawn, -1).cpu().numpy()
        if found.min() < 0:
            raise NotFiniteError("the target's logits are not finite numbers; its file is damaged")
        return found

    def _end(self, text: Text) -> Text:
        seq = text.seq
        api.llama_memory_seq_rm(self._memory, seq, -1, -1)
        text.tokens = self._tokens[seq, : self._n_tokens[seq]].tolist()
        text.has_ended = bool(self._is_last[text.tokens[-1]])
        if not text.asked.is_prompt:
            with self._apart():
                text.label_ids = self._ids[seq, : text.n_written].cpu().long()
                text.label_probs = self._probs[seq, : text.n_written].cpu()
        return text

    def _apart(self) -> AbstractContextManager[Any]:
        """Work on the GPU that does not wait for the steps of a trainer there."""
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _decode(self, tokens: Ints, places: Ints, seqs: Ints, output: int) -> None:
        runtime.clear_log()
        status = api.llama_decode(self._context, self._rows.batch(tokens, places, seqs, output))
        if status:
            n = len(tokens)
            raise BackendError(f"llama_decode failed on {n} rows with {status}: {runtime.reason()}")


def _given(asked: Asked, answer: list[int]) -> Text:
    """An answer from elsewhere: its labels are its tokens."""
    ids = torch.zeros(len(answer), N_LABELS, dtype=torch.int64)
    probs = torch.zeros(len(answer), N_LABELS)
    ids[:, 0], probs[:, 0] = torch.tensor(answer), 1.0
    return Text(asked, -1, asked.prompt + answer, label_ids=ids, label_probs=probs)


class _Rows:
    """The memory of a `llama_batch` of at most `n` rows, one sequence each."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._tokens, self._places, self._seqs, self._counts = np.ones((4, n), np.int32)
        self._output = np.zeros(n, np.int8)
        step = self._seqs.itemsize * np.arange(n, dtype=np.uint64)
        self._pointers = np.uint64(self._seqs.ctypes.data) + step

    def batch(self, tokens: Ints, places: Ints, seqs: Ints, output: int) -> api.llama_batch:
        n = len(tokens)
        self._tokens[:n], self._places[:n], self._seqs[:n] = tokens, places, seqs
        self._output[:n] = output
        int32, int8 = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        return api.llama_batch(
            n,
            self._tokens.ctypes.data_as(int32),
            None,
            self._places.ctypes.data_as(int32),
            self._counts.ctypes.data_as(int32),
            self._pointers.ctypes.data_as(ctypes.POINTER(int32)),
            self._output.ctypes.data_as(int8),
        )
