"""A trial of kernels, and its kept result; the CPU stands in for the GPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local import disk_cache
from dflash_local.cuda.few_rows import FewRows
from dflash_local.cuda.kernels import Experts, Heads, Kind, Shape
from dflash_local.cuda.trial import EVERY_PASS, Finding, findings, tried_rows

SHAPE, OTHER = Shape(8, 256, 48), Shape(8, 288, 48)  # Q8_0
HEADS = Heads(1, 1, 64, 8, 2)  # F16
EXPERTS, MORE = Experts(8, 256, 48, 6, 2), Experts(8, 288, 48, 6, 2)  # tried in no time
OF = {"gpu": "none"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk_cache.ENVIRONMENT, str(tmp_path))
    return tmp_path


class Lines(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def times(us: float) -> dict[int, float]:
    return dict.fromkeys((1, 2, 4, 8, 16, 32, 64), us)


def test_each_shape_is_tried_once() -> None:
    said = Lines()
    first = findings([EXPERTS, MORE, EXPERTS], "CPU", [], OF, said)
    assert [finding.shape for finding in first] == [EXPERTS, MORE]
    assert not any(finding.fault for finding in first)
    assert set(first[0].ours_us) == set(first[0].ggml_us) == set(times(0))
    assert len(said) == 1
    assert findings([EXPERTS, MORE], "CPU", [], OF, said) == first and len(said) == 1
    findings([EXPERTS], "CPU", [], {"gpu": "another"}, said)
    assert len(said) == 2
    timed = findings([EXPERTS], "CPU", [], OF, said, again=True)
    assert timed[0].ours_us != first[0].ours_us and len(said) == 3


@pytest.mark.slow
def test_attention_is_tried_like_products() -> None:
    said = Lines()
    found = findings([SHAPE, HEADS], "CPU", [], OF, said)
    assert {finding.shape for finding in found} == {SHAPE, HEADS}
    of_products = next(finding for finding in found if finding.shape == SHAPE)
    assert not of_products.fault and of_products.ours_us.keys() == times(0).keys()
    of_heads = next(finding for finding in found if finding.shape == HEADS)
    # llama.cpp's on a CPU: that is why there are others.
    assert of_heads.fault == "its results depend on the columns beside them"
    assert findings([HEADS], "CPU", [], OF, said) == [of_heads] and len(said) == 1


def test_a_large_matrix_is_cut_to_an_even_number_of_rows() -> None:
    """llama.cpp's kernels of one row read two, and nothing lies behind the last one of a trial."""
    assert tried_rows(Shape(14, 2048, 151936)) % 256 == 0
    assert tried_rows(Shape(14, 2048, 151936)) * Shape(14, 2048, 1).row_bytes <= 128 << 20
    assert tried_rows(SHAPE) == 48


def test_a_damaged_finding_is_tried_again(cache: Path) -> None:
    findings([EXPERTS], "CPU", [], OF, Lines())
    for file in (cache / "kernel-trials").iterdir():
        file.write_text('{"ours_us": {"1": 2}, "ggml_us": {}, "fault": "", "passes": false}')
    assert findings([EXPERTS], "CPU", [], OF, Lines())[0].ours_us.keys() == times(0).keys()


@pytest.mark.slow
def test_what_dies_is_put_aside_for_good_and_the_next_one_is_tried() -> None:
    """Rows of floats that are no multiple of 16 bytes have no kernel: their trial ends with an
    error. ggml aborts on rows that end in the middle of a block."""
    broken, fatal = Shape(0, 258, 48), Shape(8, 33, 48)
    found = findings([broken, fatal, SHAPE], "CPU", [], OF, Lines())
    assert [bool(finding.fault) for finding in found] == [True, True, False]
    assert "no kernel of ours takes it" in found[0].fault
    assert "died by SIGABRT" in found[1].fault
    said = Lines()
    assert findings([broken, fatal, SHAPE], "CPU", [], OF, said, again=True)[0] == found[0]
    assert found[1] == findings([fatal], "CPU", [], OF, said)[0] and len(said) == 1


def test_what_could_not_be_tried_is_tried_at_the_next_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without_modules:
        without_modules.setattr(sys, "path", [])
        found = findings([EXPERTS, MORE], "CPU", [], OF, Lines())
    assert [finding.is_ours for finding in found] == [False, False]
    assert all("did not begin" in finding.fault for finding in found)
    assert not any(finding.fault for finding in findings([EXPERTS, MORE], "CPU", [], OF, Lines()))


@pytest.mark.parametrize(
    ("shape", "ours", "ggml", "is_ours", "left"),
    [
        (SHAPE, times(9), times(10), True, range(0)),
        (SHAPE, times(12), times(10), True, range(0)),
        (SHAPE, times(13), times(10), False, EVERY_PASS),
        # All usual columns weigh alike: ours lose 14 at one, and gain 6 at sixteen.
        (SHAPE, times(10) | {1: 24.0, 16: 4.0}, times(10), True, range(0)),
        (SHAPE, times(10) | {1: 24.0, 16: 6.0}, times(10), False, EVERY_PASS),
        # No narrower pass is left than the widest.
        (SHAPE, times(2) | {32: 7.0, 64: 7.0}, times(4), True, range(32, 65)),
        (SHAPE, times(2) | {64: 7.0}, times(4), True, range(64, 65)),
        (SHAPE, times(2) | {32: 7.0}, times(4), True, range(0)),
        (SHAPE, times(2) | {16: 7.0}, times(4), True, range(0)),
        # Attention may take a little longer, as it saves a launch.
        (HEADS, times(11), times(10), True, range(0)),
        (HEADS, times(12), times(10), False, EVERY_PASS),
        (HEADS, times(2) | {64: 7.0}, times(4), True, range(0)),
        # Ours have wider passes with experts, unless they are never the faster ones.
        (EXPERTS, times(2), times(4), True, range(1, 1)),
        (EXPERTS, times(2) | {8: 5.0}, times(4), False, range(1, 1)),
        (EXPERTS, times(2) | dict.fromkeys((1, 2, 4, 8), 5.0), times(4), False, range(1, 3)),
        (EXPERTS, times(4), times(2), False, EVERY_PASS),
    ],
)
def test_the_faster_one_is_taken(
    shape: Kind, ours: dict[int, float], ggml: dict[int, float], is_ours: bool, left: range
) -> None:
    found = Finding(shape, ours, ggml)
    assert (found.is_ours, list(found.left)) == (is_ours, list(left))
    wrong = replace(found, fault="wrong")
    assert (wrong.is_ours, wrong.left) == (False, EVERY_PASS)
    few_rows = FewRows()
    few_rows.take([found])
    passes = f" in passes of {left[0]} to {left[-1]} rows" if left and left != EVERY_PASS else ""
    assert few_rows.key[1:] == ([f"{shape}{passes}"] if left else [])


def test_a_fault_on_one_gpu_holds_on_all() -> None:
    wide = Finding(SHAPE, times(2) | {64: 7.0}, times(4))
    wrong = Finding(SHAPE, times(2), times(4), fault="off by 2")
    faulty, both, reverse = FewRows(), FewRows(), FewRows()
    faulty.take([wrong])
    for found in (wrong, wide):
        both.take([found])
    for found in (wide, wrong):
        reverse.take([found])
    assert both.key == reverse.key == faulty.key


def test_exact_answers_take_what_is_right_even_where_it_is_slower() -> None:
    found = [Finding(SHAPE, times(9), times(1)), Finding(HEADS, times(9), times(1))]
    usual, exact = FewRows(), FewRows()
    usual.take(found)
    exact.take(found, exact=True)
    assert len(usual.key) == len(exact.key) + 2
    exact.take([Finding(EXPERTS, times(2), times(1))], exact=True)
    assert len(exact.key) == 1
    exact.take([Finding(OTHER, fault="it is wrong")], exact=True)
    assert str(OTHER) in exact.key


def test_a_type_with_a_fault_is_left_to_llama_cpp_in_every_shape() -> None:
    few_rows = FewRows()
    key = few_rows.key
    few_rows.take([Finding(SHAPE, times(1), times(2)), Finding(OTHER, fault="it is wrong")])
    assert few_rows.faults == [
        "the kernel for Q8_0 (Q8_0 288 x 48) is put aside on this GPU: it is wrong"
    ]
    assert few_rows.key == [*key, str(SHAPE), str(OTHER)]
