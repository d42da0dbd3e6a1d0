"""The one sentence that comes first."""

from dataclasses import replace

import pytest

from bench_report import made_report, row
from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.settings import PLAIN, RunSettings, Variant
from dflash_local.bench.measure.speed import Spread
from dflash_local.bench.report.report import Report
from dflash_local.bench.report.verdict import verdict
from dflash_local.stats import Stats
from lab.bench.markdown import markdown
from lab.bench.terminal import terminal


def report_of(*ratios: float, n: int = 4) -> Report:
    """A category for each ratio."""
    made = made_report()
    made.settings = RunSettings(variants=(Variant(),))
    rows = [row(f"text {i}", ratio=ratio) for i, ratio in enumerate(ratios)]
    made.rows = [
        replace(each, ratio=Spread(r, r, r, n)) for each, r in zip(rows, ratios, strict=True)
    ]
    return made


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((2.0,), "drafting pays: 2.00 times plain decoding's speed (chain auto, by"),
        ((2.0, 1.5, 8.0), "drafting pays: 2.88 times"),
        ((2.0, 0.5, 8.0), "whether drafting pays differs between texts: 2.00 times"),
        ((1.3, 0.89), "whether drafting pays differs between texts: 1.08 times"),
        ((0.99, 1.0), "drafting neither gains nor costs anything: 0.99 times"),
        ((0.5, 0.9), "drafting does not pay: 0.67 times"),
    ],
)
def test_it_says_whether_drafting_pays(ratios: tuple[float, ...], said: str) -> None:
    assert verdict(report_of(*ratios)).startswith(said)


def test_without_accepted_drafts_there_is_no_gain() -> None:
    """A busy machine makes one of two plain answers faster than the other."""
    made = report_of(1.2, 1.1)
    stats = Stats(rounds=100, drafted=3, accepted=1, emitted=103, outcomes={(0, 1): 99, (3, 2): 1})
    made.rows = [replace(each, acceptance=Acceptance(stats)) for each in made.rows]
    told = "drafting gains nothing, as hardly any draft was accepted: 1.15 times"
    assert verdict(made).startswith(told)
    # Few rounds of many drafts, as of a text that is copied, are a gain.
    stats = Stats(rounds=4, drafted=60, accepted=60, emitted=65, outcomes={(0, 1): 2, (30, 31): 2})
    made.rows[0] = replace(made.rows[0], acceptance=Acceptance(stats))
    assert verdict(made).startswith("drafting pays: 1.15")


def test_it_names_the_worst_and_the_best_category() -> None:
    assert verdict(report_of(2.0, 0.5, 8.0)).endswith("from 0.50 on text 1 to 8.00 on text 2")


def test_the_fastest_way_counts() -> None:
    made = report_of(1.5)
    tree = Variant("auto", "tree")
    made.settings = RunSettings(variants=(Variant(), tree))
    made.rows.append(row("text 0", ratio=1.7, variant=tree))
    assert "1.70 times plain decoding's speed (tree auto, by" in verdict(made)


def test_one_prompt_gives_no_verdict() -> None:
    assert verdict(report_of(9.0, n=1)).startswith("1 measured answer is too few for a verdict")
    assert verdict(report_of(9.0, n=2)).startswith("2 measured answers are too few")


def test_a_target_alone_has_its_speed() -> None:
    made = report_of(1.0)
    made.settings = RunSettings(variants=())
    made.rows = [
        replace(each, variant=PLAIN, drafted=None, ratio=None, acceptance=Acceptance())
        for each in made.rows
    ]
    assert verdict(made) == "plain decoding makes 100 tokens/s; no drafts were measured"


def test_it_comes_first_everywhere() -> None:
    made = made_report()
    assert terminal(made).splitlines()[0] == verdict(made)
    assert verdict(made) in markdown(made).splitlines()[2]
    assert made.as_dict()
