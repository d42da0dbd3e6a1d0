"""An ordinary small language model as a drafter: it writes the next tokens by itself."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.draft.growing import GrowingDraft
from dflash_local.errors import ContextFullError, InputError
from dflash_local.gguf.drafter_spec import ModelSpec
from dflash_local.target_model.batch import Batch, Outputs
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.taps import Features, StoredFeatures
from dflash_local.target_model.target import Target

_LEAST_CHANCE = 0.25
"""A draft ends where its chance, all of it together, is less: a pass of the small model then costs
more than it brings, as that takes a third to a tenth of a pass of the target."""


class ModelDrafter(Drafter):
    """A language model with the target's vocabulary, in a context of its own. Drafts are chains of
    its likeliest tokens. Of the context features it reads the tokens alone.

    What was drafted stays in its cache until the target has decided, so what is accepted is not
    decoded again. A recurrent state could not be cut back then: such a model drafts in a sequence
    that shares the text's, and is emptied after it.
    """

    name = "the small model"
    saves_rows = by_steps = True

    def __init__(
        self, path: str | os.PathLike[str], target: Target, spec: ModelSpec, options: TargetOptions
    ) -> None:
        """`options`: how the model is opened. Its sequences are those of the target; its context
        has a block of cells more for each. Raises as `Target`."""
        self._spec = spec
        self._model = Target(path, options, few_rows=target.few_rows, threads=target.threads)
        self.file_key = self._model.file_key
        self._n_seq = target.options.n_seq
        self._texts: list[list[int]] = [[] for _ in range(options.n_seq)]
        """What its cache has of each sequence."""
        self._lost: list[list[int]] = [[] for _ in range(options.n_seq)]
        """What it has to decode again of each, as its state could not be cut back."""
        self._lengths = [0] * options.n_seq
        """How much of that is injected. The rest was drafted."""
        target.attach(self)

    @property
    def block_size(self) -> int:
        return self._spec.block_size

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    def inject(self, seq: int, features: Features) -> None:
        self._inject({seq: self._new(seq, _tokens(features))})
        self._lengths[seq] += len(_tokens(features))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        left = {r.seq: self._new(r.seq, _tokens(r.features)) for r in requests}
        n_rows = sum(map(len, left.values())) + len(requests)
        if n_rows > self._model.n_batch or self._model.is_recurrent:
            self._inject(left)
        seqs = [self._branch(request.seq) for request in requests]
        drafts = [GrowingDraft(request, _LEAST_CHANCE) for request in requests]
        going = list(range(len(requests)))
        while going:
            batch = Batch()
            for i in going:
                request = requests[i]
                rows = drafts[i].tokens[-1:] or [*left[request.seq], request.anchor]
                self._add(batch, seqs[i], rows, outputs="last")
            self._run(batch)
            for row, i in enumerate(list(going)):
                drafts[i].draw(self._model, row)
                if drafts[i].is_done(self._model.vocabulary):
                    going.remove(i)
        for request, seq in zip(requests, seqs, strict=True):
            self._lengths[request.seq] += len(_tokens(request.features))
            if seq != request.seq:
                self._cut(seq, 0)
        return [each.draft() for each in drafts]

    def truncate(self, seq: int, length: int) -> None:
        self._lengths[seq] = min(self._lengths[seq], length)
        self._cut(seq, self._lengths[seq])
        if self._model.is_recurrent and not length:  # a draft that failed leaves its branch
            self._cut(self._n_seq + seq, 0)

    def copy(self, source: int, target: int, length: int) -> None:
        self._cut(target, 0)
        if self._lost[source] or not self._model.can_copy(source, length):
            self._lost[target] = [*self._lost[source], *self._texts[source]][:length]
        else:
            self._model.copy(source, target, length)
            self._texts[target] = self._texts[source][:length]
        self._lengths[target] = length

    def save(self, seq: int) -> NDArray[np.uint8]:
        self._cut(seq, self._lengths[seq])
        self._inject({seq: self._new(seq, [])})
        text = np.asarray([len(self._texts[seq]), *self._texts[seq]], np.int32)
        return np.concatenate([text.view(np.uint8), self._model.save(seq)])

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        self._cut(seq, 0)
        self._lengths[seq] = 0
        n = 1 + int(saved[:4].view(np.int32)[0])
        text = saved[4 : 4 * n].view(np.int32).tolist()
        if not self._model.restore_saved(seq, np.ascontiguousarray(saved[4 * n :]), text):
            raise ContextFullError("the drafter's saved text does not fit its context")
        self._texts[seq], self._lengths[seq] = text, len(text)

    def close(self) -> None:
        self._model.close()

    def _new(self, seq: int, tokens: list[int]) -> list[int]:
        """Those of the next tokens of a sequence that are not in the cache already, as drafts, and
        before them what it has lost. Other drafts are taken out of the cache."""
        begin, n = self._lengths[seq], 0
        for drafted, token in zip(self._texts[seq][begin:], tokens, strict=False):
            if drafted != token:
                break
            n += 1
        self._cut(seq, begin + n)
        lost, self._lost[seq] = self._lost[seq], []
        return lost + tokens[n:]

    def _inject(self, left: dict[int, list[int]]) -> None:
        """Decode the next tokens of some sequences, which are then none."""
        while any(left.values()):
            batch = Batch()
            for seq, tokens in left.items():
                n = min(len(tokens), self._model.n_batch - len(batch))
                if n:
                    self._add(batch, seq, tokens[:n], outputs="none")
                    del tokens[:n]
            self._run(batch)

    def _add(self, batch: Batch, seq: int, tokens: Sequence[int], outputs: Outputs) -> None:
        # Some models have a few unused tokens more than others of their family.
        known = [token if token < self._model.n_vocab else 0 for token in tokens]
        batch.add(seq, len(self._texts[seq]), known, outputs=outputs)

    def _run(self, batch: Batch) -> None:
        self._model.run(batch)
        for seq, token in zip(batch.seq_ids, batch.tokens, strict=True):
            self._texts[seq].append(token)

    def _branch(self, seq: int) -> int:
        """The sequence in which drafts go on from this one."""
        if not self._model.is_recurrent:
            return seq
        branch = self._n_seq + seq
        if self._texts[seq]:
            self._model.copy(seq, branch, len(self._texts[seq]))
        self._texts[branch] = list(self._texts[seq])
        return branch

    def _cut(self, seq: int, length: int) -> None:
        """Forget the tokens from `length` on; with 0 also what a failed pass has left."""
        text = self._texts[seq]
        if not length:
            self._model.clear(seq)
            self._texts[seq], self._lost[seq] = [], []
        elif self._lost[seq]:
            del self._lost[seq][length:]
        elif length < len(text):
            if self._model.truncate(seq, length):
                del text[length:]
            else:
                self._model.clear(seq)
                self._texts[seq], self._lost[seq] = [], text[:length]


def _tokens(features: Features) -> list[int]:
    if not isinstance(features, StoredFeatures):
        raise InputError("a drafter that is a language model reads tokens; these are features")
    return list(features.tokens)
