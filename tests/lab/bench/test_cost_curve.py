"""The cost of a pass, measured without a trace in the caches."""

import pytest

from dflash_local import Model
from lab.bench import cost_curve as module
from lab.bench.cost_curve import cost_curve


def test_the_cost_curve_leaves_the_caches_empty(model: Model) -> None:
    model.forget()
    curve = cost_curve(model.target, [1, 8])
    assert list(curve) == [1, 8]
    assert min(curve.values()) > 0
    assert model.generate("a", max_tokens=1).stats.cached_tokens == 0


def test_slow_passes_are_not_repeated_often(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    decode = module.decode

    def counted(target: object, begin: int, tokens: list[int], **options: object) -> None:
        passes.append(len(tokens))
        decode(model.target, begin, tokens)

    monkeypatch.setattr(module, "decode", counted)
    for budget_s, n_timed in (("1e-9", 2), ("1000", 7)):
        monkeypatch.setenv("DFLASH_LOCAL_CALIBRATION_S", budget_s)
        passes.clear()
        cost_curve(model.target, [1], depth=4)
        assert len(passes) == 1 + n_timed
