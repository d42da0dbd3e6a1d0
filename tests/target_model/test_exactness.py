"""The exactness of verifying on this machine: measured, kept, told, and true."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_coder
from dflash_local import Model, load
from dflash_local.target_model import exactness
from dflash_local.target_model.exactness import (
    WIDTHS,
    Exactness,
    measure_exactness,
    with_isolation_note,
)
from dflash_local.target_model.target import Target
from pair_engine import open_target


@pytest.fixture(scope="module")
def f32(f32_target: Path) -> Iterator[Target]:
    """The tiny target with its weights in F32, whose products depend on the batch."""
    with open_target(f32_target, n_ctx=256) as target:
        yield target


@pytest.fixture
def in_48_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is."""
    monkeypatch.setattr(exactness, "_BUDGET_S", 1e9)
    monkeypatch.setattr(exactness, "_MOST_ROWS", 48)


def no_caches() -> None:
    pass


@pytest.mark.slow
def test_the_shipped_pair_is_exact_to_its_block(model: Model) -> None:
    found = model.exactness()
    assert found.exact_width(32) == 16
    assert found.differences[32] == dict.fromkeys(WIDTHS, 0.0)
    n = found.n_rows[32]
    assert n >= 16
    assert found.lines()[0] == (
        f"after 32 tokens: of {n} rows none differed by a bit when verified at widths up to 16, "
        "the widest measured"
    )
    assert found.lines()[-1].endswith("change nothing of an answer")
    assert found.as_dict()["32"]["exact_width"] == 16
    json.dumps(found.as_dict())


@pytest.mark.slow
def test_it_is_measured_once(own_cache: Path, in_48_rows: None) -> None:
    """The second time nothing is decoded: the caches stay as they are."""
    prompt = tiny_coder.prompts()["code"][0]
    with load(
        *tiny_coder.pair(), n_ctx=256, kv_type="q8_0", n_gpu_layers=0, n_threads=1, quiet=True
    ) as model:
        expected = model.generate(prompt, max_tokens=8)
        found = model.exactness()
        (kept,) = (own_cache / "exactness").iterdir()
        again = model.generate(prompt, max_tokens=8)
        assert again.stats.cached_tokens == 0  # measuring took the caches
        assert model.exactness() == found
        third = model.generate(prompt, max_tokens=8)
        assert third.stats.cached_tokens == third.stats.prompt_tokens - 1
        assert expected.tokens == again.tokens == third.tokens
        # Of another setting it knows nothing.
        kept.write_text("{")
        assert model.exactness() == found
        assert json.loads(kept.read_text())
    with load(
        *tiny_coder.pair(), n_ctx=128, kv_type="f16", n_gpu_layers=0, n_threads=1, quiet=True
    ) as other:
        other.exactness()
        assert len(list((own_cache / "exactness").iterdir())) == 2


@pytest.mark.slow
def test_weights_in_f32_are_not_exact(own_cache: Path, in_48_rows: None, f32: Target) -> None:
    """It looks at as many rows as the time allows: sixteen may be equal where some are not."""
    found = measure_exactness(f32, before=no_caches)
    assert set(found.n_rows.values()) == {48}
    assert 0 < found.noise() < 0.1
    assert found.exact_width(32) < 16
    assert f"beyond, logits differ by up to {found.noise():.3g}" in "\n".join(found.lines())


@pytest.mark.slow
def test_a_context_too_small_to_measure_in(own_cache: Path) -> None:
    with open_target(tiny_coder.pair()[0], n_ctx=256) as target:
        found = measure_exactness(target, before=no_caches)
        # 240 tokens are what fits before the widest pass.
        assert set(found.differences) <= {32, target.n_ctx - max(WIDTHS)}
        target.decode([5], [0], [0], [True])
        assert np.isfinite(target.logits(0)).all()  # it left the target empty and usable


def test_in_words() -> None:
    exact = Exactness(
        {32: {2: 0.0, 4: 0.0, 8: 0.25, 16: 0.5}, 480: dict.fromkeys(WIDTHS, 0.0)},
        {32: 2048, 480: 16},
    )
    assert exact.lines() == [
        "after 32 tokens: of 2048 rows none differed by a bit when verified at widths up to 4; "
        "beyond, logits differ by up to 0.5",
        "after 480 tokens: of 16 rows none differed by a bit when verified at widths up to 16, "
        "the widest measured",
    ]
    assert exact.noise() == 0.5
    assert Exactness({32: {2: 1e-6, 4: 0.0}}, {32: 16}).exact_width(32) == 1


@pytest.mark.parametrize(
    ("options", "exact", "noise", "told"),
    [
        ({"kv_type": "q8_0"}, False, 0.0, "change nothing of an answer"),
        ({"kv_type": "q8_0", "n_seq": 4}, False, 0.0, "change nothing of an answer"),
        ({"kv_type": "q8_0"}, False, 0.1, "may change the last bits"),
        ({"kv_type": "f16"}, False, 0.0, "may change the last bits"),
        ({"kv_type": "f16"}, True, 0.0, "change nothing of an answer"),
        ({"kv_type": "f16"}, True, 0.1, "nothing of a plain answer, of a drafted one the last"),
        ({"kv_type": "q8_0", "n_branches": 16}, False, 0.0, "may change the last bits"),
    ],
)
def test_what_holds_of_other_requests(
    options: dict[str, Any], exact: bool, noise: float, told: str
) -> None:
    """By mode, as docs/exactness.md has it; tests/engine/test_history.py holds it."""
    measured = Exactness({32: {2: noise}}, {32: 16})
    with open_target(tiny_coder.pair()[0], n_ctx=256, **options) as target:
        found = with_isolation_note(measured, target, exact=exact)
    assert told in found.others
    assert found.lines()[-1] == found.others
    assert (found.differences, found.n_rows) == (measured.differences, measured.n_rows)
