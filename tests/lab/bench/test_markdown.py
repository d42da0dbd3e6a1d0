"""The Markdown of a benchmark: tables of tasks, with the command beside them."""

from bench_report import made_report
from lab.bench.markdown import markdown
from lab.bench.terminal import terminal


def test_it_is_a_table_of_tasks_with_the_command_beside_it() -> None:
    report = made_report()
    report.server = []
    lines = markdown(report).splitlines()
    assert "dflash-local bench" in lines
    table = [line for line in lines if line.startswith("|")]
    assert "speed-up" in table[0] and "tokens per round" in table[0] and "concurrency" in table[0]
    n_single, n_concurrent = 2 * 2 * 2, 2
    assert len(table) == 2 + n_single + n_concurrent
    assert len({line.count("|") for line in table}) == 1


def test_it_says_that_speeds_at_once_are_of_something_else() -> None:
    """They stand below those of single requests, in one column."""
    report = made_report()
    said = "- several at once: tokens/s of all together, prompts included"
    assert said in markdown(report)
    report.concurrency = []
    assert said not in markdown(report)


def test_synthetic_acceptance_is_said_to_be_invalid() -> None:
    report = made_report()
    report.synthetic_length = 6.5
    assert "text: invalid" in markdown(report) and "text: invalid" in terminal(report)
    assert report.as_dict()["text_is_valid"] is False
