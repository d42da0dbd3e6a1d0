"""The memory that a loaded pair takes."""

from dflash_local import Model
from lab.bench.memory import MemoryUse


def test_the_drafters_cache_has_grown_within_its_limit(model: Model) -> None:
    found = MemoryUse.of(model)
    assert found is not None
    assert 0 < found.drafter_cache <= found.drafter_cache_limit
    assert min(found.target, found.target_cache, found.compute, found.drafter) > 0
