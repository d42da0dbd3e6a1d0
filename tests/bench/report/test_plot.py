"""The picture of a benchmark: a file of the kind that its name says, or one line why not."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from dflash_local import InputError
from dflash_local.bench.measure.environment import Machine
from dflash_local.bench.measure.single import Row, Settings
from dflash_local.bench.measure.speed import Acceptance, Speed, Spread, Way
from dflash_local.bench.peers.comparison import PeerRow
from dflash_local.bench.report.plot import check_plot, plot
from dflash_local.bench.report.plot_widths import speed_by_width
from dflash_local.bench.report.report import Report
from dflash_local.draft.shape import DraftShape

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

SPEED = Speed(Spread(100.0, 90.0, 110.0, 4), 100.0, Spread(0.01, 0.01, 0.02, 4), {}, 4, 64, 0)


def row(category: str, temperature: float, ratio: float, way: Way = Way()) -> Row:  # noqa: B008
    return Row(
        category=category,
        temperature=temperature,
        cache="cold",
        way=way,
        n_prompts=4,
        plain=SPEED,
        drafted=SPEED,
        ratio=Spread(ratio, 0.9 * ratio, 1.2 * ratio, 4),
        ttft_ratio=None,
        acceptance=Acceptance({1: 10, 4: 5, 16: 1}, widths={16: 16}),
    )


@pytest.fixture
def report() -> Report:
    return Report(
        command="dflash-local bench",
        machine=Machine(
            version="0",
            llama_cpp="llama.cpp",
            devices=("A processor",),
            n_threads=2,
            target="target.gguf",
            drafter="drafter.gguf",
            n_ctx=4096,
            kv_type="f16",
            n_gpu_layers=0,
            block_size=16,
        ),
        settings=Settings(),
        rows=[row("chat", 0.0, 2.1), row("fim", 0.0, 1.4), row("chat", 0.8, 1.7)],
        curve={1: 0.004, 2: 0.005, 16: 0.009},
    )


def test_png_is_a_picture(report: Report, tmp_path: Path) -> None:
    plot(report, tmp_path / "bench.png")
    raw = (tmp_path / "bench.png").read_bytes()
    assert raw.startswith(b"\x89PNG\r\n\x1a\n") and raw.endswith(b"IEND\xaeB`\x82")
    width, height = (int.from_bytes(raw[at : at + 4], "big") for at in (16, 20))
    assert width > 2 * height > 1000


def test_svg_holds_its_words_and_is_the_same_each_time(report: Report, tmp_path: Path) -> None:
    for name in ("a.svg", "b.SVG"):
        plot(report, tmp_path / name)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert xml.fromstring(text).tag.endswith("svg")
    assert text == (tmp_path / "b.SVG").read_text(encoding="utf-8")
    for words in ("Speed against plain decoding", "target.gguf", "one by one", "chat"):
        assert words in text


def test_chains_and_trees_are_drawn_by_width(report: Report, tmp_path: Path) -> None:
    shapes: tuple[DraftShape, ...] = ("chain", "tree")
    ways = [Way(width, shape) for width in ("auto", 8, 16) for shape in shapes]
    report.settings = Settings(ways=(*ways, Way(32, "tree")))
    report.rows = [row("chat", 0.0, 1.5, way) for way in report.settings.ways]
    speed = Spread(50.0, 50.0, 50.0, 1)
    report.peer = [PeerRow("chat", 0.0, 1, n, speed, None, 3.0) for n in (0, 7, 15)]
    plot(report, tmp_path / "bench.svg")
    text = (tmp_path / "bench.svg").read_text(encoding="utf-8")
    for words in ("Tokens a round, by rows checked", "tree auto: 100", "llama-server, DFlash"):
        assert words in text
    assert "temperature 0, tree auto" in text


def test_a_peer_with_wider_drafts_has_room(report: Report) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    report.settings = Settings(ways=(Way(4, "chain"), Way(8, "chain")))
    report.rows = [row("chat", 0.0, 1.5, way) for way in report.settings.ways]
    report.peer = [PeerRow("chat", 0.0, 1, 15, Spread(50.0, 50.0, 50.0, 1), None, 3.0)]
    axes = figure.subplots()
    speed_by_width(axes, report)
    assert axes.get_xlim()[1] > 16
    assert "16" in [tick.get_text() for tick in axes.get_xticklabels()]


def test_what_was_not_measured_leaves_its_place_empty(report: Report, tmp_path: Path) -> None:
    report.rows, report.curve = [], {}
    plot(report, tmp_path / "empty.svg")
    assert "no drafts were checked" in (tmp_path / "empty.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["bench.pdf", "bench", "missing/bench.png"])
def test_pictures_that_cannot_be_written_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        check_plot(tmp_path / name)
