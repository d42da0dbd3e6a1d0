"""The tables of a benchmark on a terminal."""

from bench_report import made_report
from dflash_local.bench.measure.settings import PLAIN
from lab.bench.terminal import terminal


def test_every_section_is_there_in_plain_characters() -> None:
    text = terminal(made_report())
    assert text.isascii()
    for heading in (
        "tokens/s",
        "a drafting round",
        "milliseconds a round",
        "rounds by their tokens",
        "llama-server on the same files",
        "a pass of",
        "memory",
    ):
        assert f"\n{heading}" in text
    assert "answers with drafts: all 64 equal plain decoding's" in text
    assert "note: a note" in text and "branch" in text
    assert "trees over chains of 4 rows, temperature 0: " in text
    assert text.count("chat (4)") == 16
    assert "chain 4" in text and "tree 4" in text
    assert "5.15x, 6.54 tokens per round" in text


def test_what_was_not_measured_has_no_section() -> None:
    report = made_report()
    report.settings, report.curve, report.memory = type(report.settings)(variants=()), {}, None
    report.concurrency, report.server, report.paper = [], [], {}
    report.rows = [row for row in report.rows if row.variant == PLAIN]
    text = terminal(report)
    for heading in ("a drafting round", "llama-server", "a pass of", "memory", "branch"):
        assert heading not in text
