"""Controllers of machines that are not this one, so that what they decide does not depend on it."""

from collections.abc import Sequence
from random import Random
from typing import Any

from dflash_local.controller.controller import Controller, Policy
from dflash_local.controller.costs import Costs

BLOCK = 16
MS = 1e-3


class Elsewhere(Controller):
    """Sees the times of a made-up machine, whatever a round takes on this one."""

    def __init__(
        self, costs: Costs, n_nodes: int = 0, *, block_size: int = BLOCK, n_copied: int = 0
    ) -> None:
        own = Costs.from_dict(costs.as_dict())
        super().__init__(own, block_size, n_nodes=n_nodes, n_copied=n_copied)
        self._machine = costs

    def observe_round(self, *given: Any, **named: Any) -> None:
        there, (n_rows, shape, n_drafting, depth, *_) = self._machine, given
        named["rebuilt"] = False
        if named.get("inject_s"):
            named["inject_s"] = there.inject_s * named["n_injected"]
        super().observe_round(
            n_rows,
            shape,
            n_drafting,
            depth,
            there.draft_s(n_drafting, depth),
            there.step_s(n_rows, depth, shape),
            there.host_s + (there.draft_host_s if n_drafting else 0.0),
            **named,
        )


class Fickle(Controller):
    """Decides by lot: whatever is decided, the answers are the same."""

    def __init__(self, seed: int, *, resigns: float = 0.0, n_nodes: int = 0) -> None:
        """`resigns` is the chance of a request to be done with drafting after a plain round;
        `n_nodes` are the most of a tree."""
        super().__init__(CHEAP, BLOCK, n_nodes=n_nodes)
        self._n_nodes = n_nodes
        self._random = Random(seed)
        self._resigns = resigns
        self._left = 0

    @property
    def idle(self) -> int:
        return self._left

    def n_drafts(
        self, policies: Sequence[Policy], limits: Sequence[int], n_others: int = 0
    ) -> list[int]:
        assert len(policies) == len(limits) > 0 and n_others >= 0
        if self._n_nodes:
            for policy in policies:
                policy.take("tree" if self._random.random() < 0.5 else "chain")
        if self._left:
            self._left -= 1
            return [0] * len(policies)
        wanted = [
            self._random.choice((0, BLOCK - 1, BLOCK - 1)) if limit > 0 and not policy.off else 0
            for policy, limit in zip(policies, limits, strict=True)
        ]
        if not any(wanted):
            self._left = self._random.randrange(12)
            for policy in policies:
                policy.off = policy.off or self._random.random() < self._resigns
        return wanted

    def rows(self, chains: Sequence[list[float]], *, drafted: bool = True) -> list[int]:
        return [self._random.randint(1, 1 + len(chain)) for chain in chains]

    def observe_round(self, *_: object, n_steps: int = 1, **__: object) -> None:
        """Learns nothing."""
        assert 1 <= n_steps <= self._left + 1
        self._left -= n_steps - 1


def _machine(rows: dict[int, float], draft: float, *, inject: float = 0.0) -> Costs:
    """From milliseconds: of passes by rows, of a draft for one sequence, of a row injected."""
    return Costs(
        {0: {n: ms * MS for n, ms in rows.items()}},
        {0: {1: draft * MS, 8: 2 * draft * MS}},
        host_s=0.1 * MS,
        inject_s=inject * MS,
    )


CHEAP = _machine({1: 4.0, 16: 4.2}, 0.4)
MACHINES = {
    # Rows cost next to nothing: each draft is checked as far as it is any good.
    "cheap": CHEAP,
    # Every row has its price.
    "by the row": _machine({1: 4.0, 2: 4.2, 16: 16.0}, 1.0),
    # Drafting pays for a while, then it does not.
    "even": _machine({1: 4.0, 16: 20.0}, 4.0, inject=0.01),
    # Looks now and then whether it pays.
    "probing": _machine({1: 4.0, 16: 20.0}, 6.0),
    # Looks once, and is done with it.
    "resigning": _machine({1: 4.0, 16: 24.0}, 8.0, inject=0.1),
    # Does not even look.
    "hopeless": _machine({1: 4.0, 16: 64.0}, 40.0, inject=0.2),
}
DECIDERS = [*MACHINES, "by lot"]


def controller(name: str, n_nodes: int = 0) -> Controller:
    """That of a machine by its name, or one that decides `by lot`; `n_nodes` are the most of a
    tree."""
    if name == "by lot":  # these draft early and often
        return Fickle(11 if n_nodes else 5, n_nodes=n_nodes)
    return Elsewhere(MACHINES[name], n_nodes)
