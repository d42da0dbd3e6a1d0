"""A drafter of your own: it proposes what followed the same two tokens earlier in the text.

It needs no weights, no hidden states and no cache, so most of the protocol is short. The answer is
the target's own whatever a drafter proposes; only the speed depends on it.

    python examples/own_drafter.py
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_local import Target
from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.engine.engine import Engine
from dflash_local.model import Model
from dflash_local.pairs.find import find_pair
from dflash_local.target_model.taps import Features


class LookupDrafter(Drafter):
    """Copies the text behind the last place where the current two tokens stood before."""

    block_size = 9  # the anchor and eight drafts

    def __init__(self, n_seq: int = 1) -> None:
        self._lengths = [0] * n_seq

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            self.inject(request.seq, request.features)
            text = [*request.text, request.anchor]
            drafts.append(Draft.chain(self._lookup(text, request.n_draft)))
        return drafts

    def _lookup(self, text: list[int], n: int) -> list[int]:
        for at in range(len(text) - 3, 0, -1):
            if text[at - 1 : at + 1] == text[-2:]:
                return text[at + 1 : at + 1 + n]
        return []

    # What the engine keeps in step with the target's cache: here only how many rows there are.

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    def inject(self, seq: int, features: Features) -> None:
        self._lengths[seq] += len(features)

    def truncate(self, seq: int, length: int) -> None:
        self._lengths[seq] = min(self._lengths[seq], length)

    def copy(self, source: int, target: int, length: int) -> None:
        self._lengths[target] = length

    def close(self) -> None:
        pass


def main() -> None:
    target = Target.load(find_pair("smollm2-135m", say=print).target, n_ctx=1024)
    with Model(Engine(target, LookupDrafter())) as model:
        prompt = "Monday: soup and bread\nTuesday: soup and bread\nWednesday:"
        plain = model.generate(prompt, max_tokens=24, draft_width=0)
        drafted = model.generate(prompt, max_tokens=24, draft_width=9)
        assert drafted.text == plain.text
        stats = drafted.stats
        print(prompt + drafted.text)
        print(f"{stats.emitted} tokens in {stats.rounds} passes of the target")


if __name__ == "__main__":
    main()
