"""The JSON object of a benchmark, and what a report sums up."""

import json
from dataclasses import replace

from bench_report import made_report
from dflash_local.bench.measure.rounding import Lead
from dflash_local.bench.measure.settings import Variant
from dflash_local.bench.measure.single import Difference
from dflash_local.bench.measure.speed import STAGES
from dflash_local.bench.prompts.case import Case


def fields(names: str) -> set[str]:
    return set(names.split())


def test_json_has_the_fields_that_scripts_read() -> None:
    told = json.loads(json.dumps(made_report().as_dict()))
    assert set(told) == fields(
        "format command machine settings synthetic_length replay text_is_valid memory_bytes rows "
        "tree_over_chain cost_curve concurrency llama_server paper n_compared n_differing "
        "n_beyond_rounding interrupted notes"
    )
    assert set(told["settings"]) == fields(
        "temperatures ways caches max_tokens repeat seed compare top_k top_p min_p"
    )
    assert told["settings"]["ways"][2] == {"width": 4, "shape": "chain", "copies": True}
    assert told["n_compared"] == 64 and told["n_differing"] == 0 and told["text_is_valid"] is True
    assert [point["rows"] for point in told["cost_curve"]] == [1, 2, 16]
    assert set(told["memory_bytes"]) == fields(
        "target target_cache compute drafter drafter_cache drafter_cache_limit"
    )
    assert told["machine"]["target"] == "target.gguf"
    assert told["paper"] == [
        {
            "category": "chat",
            "temperature": 0.0,
            "source": "arXiv 2602.06036, table 1",
            "speed_up": 5.15,
            "accepted_length": 6.54,
        }
    ]


def test_json_of_a_row() -> None:
    told = made_report().as_dict()
    row = told["rows"][0]
    assert set(row) == fields(
        "category temperature cache width shape copies n_prompts plain drafted ratio ttft_ratio "
        "over accepted_length nodes depth branches side_share accepted_lengths "
        "acceptance_by_position widths plain_rounds graph_rebuilds tree_rounds leaves side_rounds "
        "forced drafting warnings n_differing differences"
    )
    assert set(row["plain"]) == fields(
        "tokens_per_second overall_tokens_per_second ttft_s stage_s n_answers n_tokens n_too_short"
    )
    assert set(row["plain"]["tokens_per_second"]) == {"median", "low", "high", "n"}
    assert set(row["plain"]["stage_s"]) == set(STAGES)
    assert set(told["concurrency"][0]["drafted"]) > {"total_tokens_per_second", "per_request"}
    assert told["llama_server"][1]["n_drafts"] == 7


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
