"""The simple controller that any other must beat: the most tokens a second by moving averages."""

import math
from collections.abc import Sequence
from itertools import accumulate

from dflash_local.controller.costs import Costs
from dflash_local.draft.draft import Draft
from dflash_local.draft.shape import Shape, ShapeName
from drafted_text import BLOCK
from rounds import FixedPolicy

_BLEND, _HORIZON, _JUDGED, _LOOK, _TRIAL = 0.05, 20, 8, 64, 4
_STEPS = (0, 1, 3, 7)  # positions of a block that share their averages begin at these
_SURE = (0.5, 0.75, 0.9, 0.97, 0.995)


class Rival:
    """One for all sequences. Costs: as measured, times an average of (seen / measured) of each row
    count. Chances: averages of (right) by position and by the drafter's confidence."""

    def __init__(self, costs: Costs, block_size: int = BLOCK, n_nodes: int = 0) -> None:
        self._costs = costs
        self._shape: ShapeName = "chain"
        self._shapes, self._rates, self._seen, self._right = {}, {}, {}, {}
        self._round = self._off_until = self._n_drafted = self._n_kept = 0
        self._wait, self._gain, self._last, self._depth = _LOOK, 1.0, 1, 0

    def open(self, depth: int = 0, *, shapes: Sequence[Shape], **_: object) -> FixedPolicy:
        self._depth, self._shapes = depth, {shape.name: shape for shape in shapes}
        self._shape = self._shape if self._shape in self._shapes else shapes[0].name
        return FixedPolicy(self._shapes[self._shape])

    @property
    def idle(self) -> int:
        return max(self._off_until - self._round - 1, 0)

    def n_drafts(self, policies: Sequence[FixedPolicy], limits: Sequence[int]) -> list[int]:
        self._round, self._base = self._round + 1, len(policies)
        if self._n_drafted and len(self._shapes) > 1:  # the other shape is tried now and then
            other = self._n_drafted % (_LOOK + _TRIAL) < _TRIAL
            best = max(self._rates, key=self._rates.__getitem__)
            self._shape = next(name for name in self._shapes if (name != best) == other)
        for policy in policies:
            policy.shape = self._shapes[self._shape]
        is_off = self._round < self._off_until
        return [0 if is_off or limit < 1 else BLOCK - 1 for limit in limits]

    def judge(self, policies: Sequence[FixedPolicy], drafts: Sequence[Draft]) -> list[list[float]]:
        found = []
        for draft in drafts:
            kinds = zip(draft.depths, draft.logprobs, strict=True)
            rated = [math.log(self._right.get(_kind(at, p), math.exp(p)) + 1e-6) for at, p in kinds]
            found.append(Draft(draft.tokens, draft.parents, rated).chances)
        return found

    def _pass_s(self, rows: int, shape: ShapeName) -> float:
        return self._costs.step_s(rows, self._depth, shape) * self._seen.get((rows, shape), 1.0)

    def rows(self, chains: Sequence[list[float]]) -> list[int]:
        base, costs = self._base, self._costs
        ranked = sorted(((-p, i) for i, chain in enumerate(chains) for p in chain))
        draft_s = costs.draft_s(sum(map(bool, chains)), self._depth) + costs.draft_host_s
        tokens = accumulate((-p for p, _ in ranked), initial=float(base))
        fixed_s, pass_s = draft_s + costs.host_s, self._pass_s
        rates = [got / (fixed_s + pass_s(base + k, self._shape)) for k, got in enumerate(tokens)]
        best, last = max(range(len(rates)), key=rates.__getitem__), self._last - base
        if 0 <= last < len(rates):
            gained = (rates[best] / rates[last] - 1) * _HORIZON * pass_s(base, "chain")
            best = last if gained < costs.switch_s else best
        widths = [1] * len(chains)
        for _, i in ranked[:best]:
            widths[i] += 1
        return widths

    def observe(self, policy: FixedPolicy, draft: Draft, tokens: Sequence[int]) -> None:
        self._n_kept += len(tokens) - 1
        node, edges = -1, list(zip(draft.parents, draft.tokens, strict=True))
        for at, token in enumerate(tokens, 1):
            if node not in draft.parents:
                break
            first = draft.parents.index(node)
            kind, p = _kind(at, draft.logprobs[first]), math.exp(draft.logprobs[first])
            known = self._right.get(kind, p)
            self._right[kind] = known + _BLEND * ((draft.tokens[first] == token) - known)
            node = edges.index((node, token)) if (node, token) in edges else -2

    def observe_round(
        self, n_rows: int, shape: ShapeName, n_drafting: int, depth: int, draft_s: float,
        verify_s: float, host_s: float, *, n_steps: int = 1, n_injected: int = 0,
        inject_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._round += n_steps - 1
        self._depth, same, self._last = depth, n_rows == self._last, n_rows
        if same:
            ratio = verify_s / self._costs.step_s(n_rows, depth, shape)
            known = self._seen.get((n_rows, shape), 1.0)
            self._seen[n_rows, shape] = known + _BLEND * (min(ratio, 1.4 * known) - known)
        if not n_drafting:
            return
        rate = (self._base + self._n_kept) / (draft_s + verify_s + host_s + inject_s)
        known = self._rates.get(shape, rate)
        self._rates[shape] = known + 2 * _BLEND * (rate - known)
        plain = self._base / (self._pass_s(self._base, "chain") + self._costs.host_s)
        self._gain += 2 * _BLEND * (min(rate / plain, 4.0) - self._gain)
        self._n_drafted, self._n_kept = self._n_drafted + 1, 0
        if self._gain < 1 and self._n_drafted >= _JUDGED:
            self._off_until, self._gain = self._round + self._wait, 1.0
            self._wait, self._n_drafted = 2 * self._wait, 0
        elif self._n_drafted > _LOOK:
            self._wait = _LOOK


def _kind(at: int, logprob: float) -> tuple[int, int]:
    return sum(at > step for step in _STEPS), sum(math.exp(logprob) > sure for sure in _SURE)
