"""The JSON object of a benchmark, and what a report sums up."""

import json
import os
from dataclasses import replace
from pathlib import Path

from bench_report import made_report
from dflash_local.bench.measure.rounding import Lead
from dflash_local.bench.measure.settings import Variant
from dflash_local.bench.measure.single import Difference
from dflash_local.bench.prompts.case import Case


def test_json_is_what_scripts_read() -> None:
    """After a change that is meant, write the file anew with DFLASH_LOCAL_GOLDEN=write."""
    told = made_report().as_dict()
    assert (told["n_compared"], len(told["rows"]), len(told["concurrency"])) == (64, 32, 8)
    for rows in ("rows", "concurrency"):
        del told[rows][1:]
    golden = Path(__file__).with_name("report.json")
    if os.environ.get("DFLASH_LOCAL_GOLDEN") == "write":
        golden.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    assert json.loads(json.dumps(told)) == json.loads(golden.read_text(encoding="utf-8"))


def test_differences_beyond_rounding_are_counted() -> None:
    report = made_report()
    case = Case("chat", 0, [1])
    found = [Difference(case, Variant(), "cold", 7, Lead(gap, 0.02)) for gap in (0.01, 0.1)]
    report.rows[0] = replace(report.rows[0], differences=found)
    told = report.as_dict()
    assert (told["n_differing"], told["n_beyond_rounding"]) == (2, 1)
    assert told["rows"][0]["differences"][1] == {
        "category": "chat",
        "prompt": 0,
        "width": "auto",
        "shape": "chain",
        "copies": True,
        "cache": "cold",
        "token": 7,
        "gap": 0.1,
        "noise": 0.02,
        "is_within_rounding": False,
    }
