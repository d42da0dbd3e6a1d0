"""The picture of a benchmark: a file of the kind that its name says, or one line why not."""

import xml.etree.ElementTree as xml
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench_report import made_report, row, server_row
from dflash_local import InputError
from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.settings import PLAIN, RunSettings, Variant
from dflash_local.stats import Stats
from lab.bench.plot import accepted_lengths, check_plot, plot, speed_by_width
from lab.bench.report import LabReport

pytest.importorskip("matplotlib", reason="pictures need matplotlib")


@pytest.fixture
def report() -> LabReport:
    """Of one variant: the lower half of the picture."""
    made = made_report()
    made.settings = RunSettings()
    made.rows = [row("chat", 0.0, 2.1), row("fim", 0.0, 1.4), row("chat", 0.8, 1.7)]
    return made


@pytest.mark.slow
def test_svg_holds_its_words_and_is_the_same_each_time(report: LabReport, tmp_path: Path) -> None:
    for name in ("a.svg", "b.SVG"):
        plot(report, tmp_path / name)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert xml.fromstring(text).tag.endswith("svg")
    assert text == (tmp_path / "b.SVG").read_text(encoding="utf-8")
    for words in ("Speed against plain decoding", "target.gguf", "one by one", "chat"):
        assert words in text


@pytest.mark.slow
def test_chains_and_trees_are_drawn_by_width(tmp_path: Path) -> None:
    plot(made_report(), tmp_path / "bench.svg")
    text = (tmp_path / "bench.svg").read_text(encoding="utf-8")
    for words in ("Tokens per round, by rows checked", "tree auto: 150", "llama-server, drafted"):
        assert words in text
    assert "temperature 0, tree auto" in text


def test_the_widest_drafts_and_a_marker_at_the_top_have_room(report: LabReport) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    report.settings = RunSettings(variants=(Variant(4), Variant()))
    report.rows = [row("chat", variant=variant) for variant in report.settings.variants]
    report.server = [server_row(15)]
    axes = figure.subplots()
    speed_by_width(axes, report)
    assert axes.get_xlim()[1] > 16
    assert "16" in [tick.get_text() for tick in axes.get_xticklabels()]
    assert axes.get_ylim()[1] > 1.05 * 150


def test_rounds_of_many_tokens_keep_their_numbers_apart(report: LabReport) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(4, 3))
    stats = Stats(outcomes={(62, 1): 30, (62, 3): 20, (62, 63): 2})
    report.rows = [replace(each, acceptance=Acceptance(stats)) for each in report.rows]
    axes = figure.subplots()
    accepted_lengths(axes, report)
    figure.draw_without_rendering()
    numbers = [tick.get_window_extent() for tick in axes.get_xticklabels()]
    assert len(numbers) > 4
    assert all(left.x1 < right.x0 for left, right in pairwise(numbers))


def test_a_target_alone_has_no_empty_panel(report: LabReport, tmp_path: Path) -> None:
    report.settings = RunSettings(variants=())
    report.rows = [
        replace(each, variant=PLAIN, drafted=None, ratio=None, acceptance=Acceptance())
        for each in report.rows
    ]
    plot(report, tmp_path / "plain.svg")
    text = (tmp_path / "plain.svg").read_text(encoding="utf-8")
    assert "Speed of plain decoding" in text and "no drafts were checked" not in text
    assert "How many tokens a round emits" not in text


def test_widths_that_were_all_chosen_take_no_panels(report: LabReport, tmp_path: Path) -> None:
    report.settings = RunSettings(variants=(Variant(), Variant("auto", "tree")))
    report.rows = [row("chat", variant=variant) for variant in report.settings.variants]
    plot(report, tmp_path / "auto.svg")
    text = (tmp_path / "auto.svg").read_text(encoding="utf-8")
    assert "by rows checked" not in text and "temperature 0, tree auto" in text


@pytest.mark.slow
def test_png_is_a_picture_and_higher_for_many_categories(report: LabReport, tmp_path: Path) -> None:
    heights = []
    for n in (2, 40):
        report.rows = [row(f"category {i}") for i in range(n)]
        plot(report, tmp_path / "bench.png")
        raw = (tmp_path / "bench.png").read_bytes()
        assert raw.startswith(b"\x89PNG\r\n\x1a\n") and raw.endswith(b"IEND\xaeB`\x82")
        width, height = (int.from_bytes(raw[at : at + 4], "big") for at in (16, 20))
        heights.append(height)
    assert width > 2 * heights[0] > 1000
    assert heights[1] > 1.5 * heights[0]


def test_what_was_not_measured_leaves_its_place_empty(report: LabReport, tmp_path: Path) -> None:
    report.rows, report.curve = [], {}
    plot(report, tmp_path / "empty.svg")
    assert "no drafts were checked" in (tmp_path / "empty.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["bench.pdf", "bench", "missing/bench.png"])
def test_pictures_that_cannot_be_written_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        check_plot(tmp_path / name)
