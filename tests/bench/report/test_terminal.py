"""The table of a benchmark on a terminal."""

from dataclasses import replace

import pytest

from bench_report import made_report
from dflash_local.bench.measure.settings import PLAIN, RunSettings, Variant
from dflash_local.bench.report import cell
from dflash_local.bench.report.terminal import terminal
from dflash_local.cli.terminal import fitted


def test_all_is_in_one_table_in_plain_characters() -> None:
    text = terminal(made_report())
    assert text.isascii()
    table = text.split("\n\n")[-2].splitlines()
    assert table[0].startswith("tokens/s: median (middle half)")
    assert len(table) == 4 + 2 * 2 * 4 * 2 + 4  # heads; single requests; four at once
    assert "answers with drafts: all 64 equal plain decoding's" in text
    assert "note: a note" in text
    assert "5.15x, 6.54 tokens per round" in text
    for absent in ("milliseconds a round", "llama-server", "memory"):
        assert absent not in text


def test_columns_in_which_no_rows_differ_are_left_out() -> None:
    report = made_report()
    report.settings, report.concurrency, report.paper = RunSettings(), [], {}
    report.rows = [row for row in report.main_rows if row.variant == Variant()]
    head = terminal(report).split("prompts", 1)[1].splitlines()[0]
    for absent in ("caches", "at once", "drafts", "paper"):
        assert absent not in head
    assert "drafted" in head


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_the_table_keeps_within_the_terminal(columns: int) -> None:
    report = made_report()
    shown = fitted(terminal(report, columns), columns)
    assert max(map(len, shown.splitlines())) <= columns
    words = " ".join(shown.split())
    for name in ("plain", "drafted", "ratio", "tokens per round", "first token, ms"):
        assert set(name.split()) <= set(words.replace(";", " ").split()), name
    # all that a wide terminal shows but for the middle halves
    for value in ("10 / 10", "150", "400"):
        assert value in words
    assert report.rows[0].drafted and "135-180" not in words


def test_long_times_have_no_exponent() -> None:
    assert [cell.ms(seconds) for seconds in (0.00123456, 0.25, 2.1416)] == ["1.23", "250", "2142"]


def test_a_row_without_room_is_a_paragraph() -> None:
    report = made_report()
    report.concurrency = []
    lines = terminal(report, 40).splitlines()
    at = lines.index("chat (4), temperature 0, caches cold,")
    assert lines[at : at + 3] == [
        "chat (4), temperature 0, caches cold,",
        "chain auto",
        "  plain 100; drafted 150; ratio 1.50;",
    ]


def test_plain_decoding_alone_has_no_columns_of_drafts() -> None:
    report = made_report()
    report.settings, report.concurrency = RunSettings(variants=()), []
    report.rows = [replace(row, variant=PLAIN, drafted=None) for row in report.main_rows]
    assert "ratio" not in terminal(report)
