"""The cost of a pass, measured without a trace in the caches."""

from dflash_local import Model
from lab.bench.cost_curve import cost_curve


def test_the_cost_curve_leaves_the_caches_empty(model: Model) -> None:
    model.forget()
    curve = cost_curve(model.target, [1, 8])
    assert list(curve) == [1, 8]
    assert min(curve.values()) > 0
    assert model.generate("a", max_tokens=1).stats.cached_tokens == 0
