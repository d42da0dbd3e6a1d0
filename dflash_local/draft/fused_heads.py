"""The heads of a target's own file in one static ggml graph, on the device of its output head."""

from collections.abc import Sequence

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.graph_drafter import GraphDrafter
from dflash_local.draft.growing import GrowingDraft
from dflash_local.draft.heads_drafter import LEAST_CHANCE, HeadsDrafter
from dflash_local.errors import InputError
from dflash_local.gguf.drafter_spec import HeadLayerSpec, HeadsSpec
from dflash_local.llama import native
from dflash_local.target_model.taps import Features, StoredFeatures
from dflash_local.target_model.target import Target


class FusedHeads(GraphDrafter[native.HeadsDrafter]):
    """Drafts as `HeadsDrafter` does, with all steps of a draft in one graph of ours: the target's
    states, the head's cache and the drafted tokens stay on the device. Its cache is in f16.

    The steps of a graph are all computed, also those after a draft has become unlikely, which are
    left out.
    """

    name = HeadsDrafter.name
    by_steps = True

    def __init__(
        self, target: Target, spec: HeadsSpec, layer: HeadLayerSpec, *, n_seq: int, n_ctx: int
    ) -> None:
        """Raises FileError for heads that the graph does not know, BackendError if they are on
        several devices, or if the memory does not suffice."""
        self.spec, self._target = spec, target
        self.file_key = [*target.file_key, "heads"]
        with target.own_kernels():
            self._graph = native.HeadsDrafter(
                target.address,
                target.native,
                layer,
                spec.n_draft,
                n_seq,
                n_ctx,
                target.n_threads,
                target.threads,
            )
        target.attach(self)

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    def inject(self, seq: int, features: Features) -> None:
        rows = self._stored(features)
        self._open.inject(seq, rows.tokens, rows.rows)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if not requests:
            return []
        rows = [self._stored(request.features) for request in requests]
        ids, logprobs = self._open.draft(
            [request.seq for request in requests],
            [each.tokens for each in rows],
            [each.rows for each in rows],
            [request.anchor for request in requests],
            max(request.n_draft for request in requests),
        )
        drafts = [GrowingDraft(request, LEAST_CHANCE) for request in requests]
        for draft, *drafted in zip(drafts, ids.tolist(), logprobs.tolist(), strict=True):
            for token, logprob in zip(*drafted, strict=True):
                draft.add(token, logprob)
                if draft.is_done(self._target.vocabulary):
                    break
        return [each.draft() for each in drafts]

    def _stored(self, features: Features) -> StoredFeatures:
        if not isinstance(features, StoredFeatures) or features.target is not self._target:
            raise InputError("heads read tokens, too, and states in the store of their target")
        return features
