"""The picture of a benchmark: a file of the kind that its name says, or one line why not."""

import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

import pytest

from bench_report import made_report, row
from dflash_local import InputError
from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.settings import PLAIN, RunSettings, Variant
from dflash_local.bench.measure.single import SpeedRow
from lab.bench.plot import check_plot, plot
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


@pytest.mark.slow
def test_what_was_not_measured_has_no_panel(report: LabReport, tmp_path: Path) -> None:
    def drawn(rows: list[SpeedRow], *variants: Variant) -> str:
        report.settings, report.rows = RunSettings(variants=variants), rows
        plot(report, tmp_path / "some.svg")
        return (tmp_path / "some.svg").read_text(encoding="utf-8")

    chosen = (Variant(), Variant("auto", "tree"))
    text = drawn([row("chat", variant=variant) for variant in chosen], *chosen)
    assert "by rows checked" not in text and "temperature 0, tree auto" in text
    undrafted = {"drafted": None, "ratio": None, "acceptance": Acceptance()}
    text = drawn([replace(row("chat"), variant=PLAIN, **undrafted)])
    assert "Speed of plain decoding" in text and "no drafts were checked" not in text
    assert "How many tokens a round emits" not in text
    report.curve = {}
    assert "no drafts were checked" in drawn([], Variant())


@pytest.mark.parametrize("name", ["bench.pdf", "bench", "missing/bench.png"])
def test_pictures_that_cannot_be_written_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        check_plot(tmp_path / name)
