"""A whole run on a pair of random weights: all requests are measured, or refused with a reason."""

from pathlib import Path
from typing import Any

import pytest

from dflash_local.bench.measure.settings import RunSettings, Variant
from dflash_local.bench.report.report import Report
from dflash_local.engine.engine import Engine
from dflash_local.fit.options import LoadOptions
from dflash_local.fit.plan import Plan
from dflash_local.loading import open_engine
from dflash_local.pair import open_pair
from lab.bench.run import LabBenchmark, LabOptions
from lab.shapes.writer import write_pair
from mini_shapes import DENSE

N_CTX = 256
pytestmark = pytest.mark.slow


def measured(folder: Path, max_tokens: int, **options: Any) -> Report:
    def opened(target: Path, draft: Path | None, loading: LoadOptions) -> tuple[Engine, Plan]:
        return open_engine(open_pair(target, draft), loading, say=lambda _line: None)

    target, draft = write_pair(DENSE, "Q8_0", folder, n_layer=3)
    settings = RunSettings((0.0,), (Variant(8),), max_tokens=max_tokens)
    loading = {"n_ctx": N_CTX, "n_gpu_layers": 0, "n_threads": 1}
    asked = LabOptions(target, draft, settings, "bench", limit=1, loading=loading, **options)
    return LabBenchmark(asked, opened, lambda _line: None).run()


def test_random_answers_are_as_long_as_the_context_holds(tmp_path: Path) -> None:
    report = measured(tmp_path, 10**12, random=True, synthetic_length=4.0)
    for row in report.rows:
        assert row.drafted is not None
        assert N_CTX - 128 - 1 <= row.plain.n_tokens == row.drafted.n_tokens <= N_CTX - 128 + 1


def test_long_prompts_alone_are_not_measured_at_once_and_that_is_told(tmp_path: Path) -> None:
    report = measured(tmp_path, 9, categories=("long",), depths=(128,), concurrency=(2,))
    assert [row.category for row in report.rows] == ["128"]
    assert report.concurrency == []
    assert "several at once: left out, as there are only long prompts" in report.notes
