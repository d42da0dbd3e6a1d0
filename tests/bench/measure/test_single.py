"""What the benchmark measures: real answers of the shipped pair, plain and drafted in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_local import Model, load
from dflash_local.bench.measure.concurrent import run_together
from dflash_local.bench.measure.environment import Machine, memory_of
from dflash_local.bench.measure.rounding import lead_after
from dflash_local.bench.measure.single import CACHES, Row, Settings, run
from dflash_local.bench.measure.speed import (
    PLAIN,
    STAGES,
    Acceptance,
    Speed,
    Spread,
    Way,
    ask,
    cost_curve,
    first_difference,
)
from dflash_local.bench.peers.comparison import Peer, PeerRow, held_against
from dflash_local.bench.prompts.case import Case, built_in, read_by
from dflash_local.bench.report.report import Report
from dflash_local.bench.report.terminal import markdown, terminal
from dflash_local.stats import Stats

WAYS = (Way(), Way(4), Way(4, "tree"))
SETTINGS = Settings(temperatures=(0.0, 0.8), ways=WAYS, max_tokens=12)


@pytest.fixture(scope="module")
def model(pair: tuple[Path, Path]) -> Iterator[Model]:
    """The shipped pair on one thread: fastest where the other tests need the rest of the cores."""
    options: dict[str, Any] = {"n_ctx": 2048, "kv_type": "q8_0", "n_gpu_layers": 0, "n_threads": 1}
    with load(*pair, quiet=True, draft_shape="auto", **options) as loaded:
        yield loaded


def quiet(_line: str) -> None:
    pass


@pytest.fixture(scope="module")
def cases(model: Model) -> list[Case]:
    prompts = built_in(("chat", "fim"), limit=2, shipped=True)
    return read_by(model, prompts, room=SETTINGS.max_tokens)[0]


@pytest.fixture(scope="module")
def rows(model: Model, cases: list[Case]) -> list[Row]:
    return run(model, cases, SETTINGS, quiet)


@pytest.fixture(scope="module")
def report(model: Model, rows: list[Row]) -> Report:
    model.forget()
    return Report(
        command="dflash-local bench",
        machine=Machine.of(model),
        settings=SETTINGS,
        rows=rows,
        curve=cost_curve(model.target, [1, 2, 4], repeats=1),
        memory=memory_of(model),
        notes=["a note"],
    )


def test_every_combination_has_a_row(rows: list[Row]) -> None:
    found = [(row.temperature, row.category, row.way, row.cache) for row in rows]
    assert found == [
        (temperature, category, way, cache)
        for temperature in SETTINGS.temperatures
        for category in ("chat", "fim")
        for way in WAYS
        for cache in CACHES
    ]


def test_rows_hold_plain_and_drafted_answers_of_the_same_prompts(rows: list[Row]) -> None:
    for row in rows:
        assert row.drafted is not None
        assert row.n_prompts == row.plain.n_answers == row.drafted.n_answers == 2
        assert row.plain.ttft_s is not None and row.plain.ttft_s.low > 0
        assert set(row.plain.stage_s) == set(STAGES)
        # A greedy token is drawn where the logits lie, within the pass.
        assert row.plain.stage_s["verify"] > row.plain.stage_s["sample"] >= 0


def test_fixed_widths_are_kept(rows: list[Row]) -> None:
    for row in rows:
        if row.way.width == 4:
            assert row.acceptance.mean_length is not None
            assert 1 <= row.acceptance.mean_length <= 4
            assert max(row.acceptance.lengths) <= 4
            assert max(row.acceptance.widths) <= 4


def test_both_shapes_are_measured_on_one_model(rows: list[Row]) -> None:
    for row in (row for row in rows if row.way.width == 4):
        found = row.acceptance
        assert found.nodes and found.depth and found.branches and found.side_share is not None
        assert 1 <= found.depth <= found.nodes <= 3
        if row.way.shape == "chain":
            assert (found.depth, found.branches, found.side_share) == (found.nodes, 1, 0)
            assert found.tree_rounds == 0
    trees = [row.acceptance for row in rows if row.way == Way(4, "tree")]
    assert Acceptance.sum(trees).tree_rounds > 0


def test_what_drafts_are_worth_is_shown_even_where_none_are_made(rows: list[Row]) -> None:
    for row in (row for row in rows if row.way.width == "auto"):
        assert row.drafting is not None
        assert row.shown.mean_length is not None and row.shown.mean_length >= 1
        if row.forced:
            told = row.as_dict()["forced"]
            assert told["plain_rounds"] < sum(told["widths"].values())
    assert all(row.forced is None for row in rows if row.way.width == 4)


def test_greedy_answers_equal_plain_ones(rows: list[Row]) -> None:
    assert [difference for row in rows for difference in row.differences] == []
    greedy = [row for row in rows if row.temperature == 0]
    assert all(row.plain.n_tokens == row.drafted.n_tokens for row in greedy if row.drafted)


def test_a_prefix_hit_keeps_the_prompt(model: Model, cases: list[Case]) -> None:
    model.forget()
    found = [
        ask(model, cases[0].tokens, Way(4), temperature=0.0, seed=0, max_tokens=12) for _ in CACHES
    ]
    assert [answer.stats.cached_tokens for answer in found] == [0, len(cases[0].tokens) - 1]
    assert found[0].tokens == found[1].tokens


def test_without_a_drafter_there_are_plain_rows(model: Model, cases: list[Case]) -> None:
    settings = replace(SETTINGS, ways=(), temperatures=(0.0,))
    rows = run(model, cases[:1], settings, quiet)
    assert [(row.way, row.drafted, row.ratio) for row in rows] == [(PLAIN, None, None)] * 2


def test_progress_is_told_once_for_each_category(model: Model, cases: list[Case]) -> None:
    told: list[str] = []
    run(model, cases, replace(SETTINGS, max_tokens=12, ways=(Way(4),)), told.append)
    assert [line.split(":")[0] for line in told] == [
        "chat, temperature 0",
        "fim, temperature 0",
        "chat, temperature 0.8",
        "fim, temperature 0.8",
    ]


def test_several_at_once_give_what_one_at_a_time_gives(model: Model, cases: list[Case]) -> None:
    model.forget()
    ways = (Way(4), Way(4, "tree"))
    settings = replace(SETTINGS, temperatures=(0.0,), ways=ways, max_tokens=12)
    rows, notes = run_together(model.engine, cases, [1], settings, quiet)
    assert notes == []
    assert [(row.category, row.n, row.way) for row in rows] == [
        (category, 1, way) for category in ("chat", "fim") for way in ways
    ]
    for row in rows:
        assert row.drafted is not None and row.ratio is not None
        assert row.plain.speed.n_tokens == row.drafted.speed.n_tokens
        assert row.plain.speed.n_answers == 4


def test_what_the_context_cannot_hold_at_once_is_told(model: Model, cases: list[Case]) -> None:
    model.forget()
    settings = replace(SETTINGS, max_tokens=2040)
    rows, notes = run_together(model.engine, cases[:1], [1], settings, quiet)
    assert rows == []
    assert "left out" in notes[0] and str(model.n_ctx) in notes[0]


def test_the_cost_curve_leaves_the_caches_empty(model: Model) -> None:
    model.forget()
    curve = cost_curve(model.target, [1, 8], repeats=2)
    assert list(curve) == [1, 8]
    assert min(curve.values()) > 0
    assert model.generate("a", max_tokens=1).stats.cached_tokens == 0


def test_the_lead_of_a_token_is_measured_where_answers_part(
    model: Model, cases: list[Case]
) -> None:
    model.forget()
    plain = model.generate(
        cases[0].tokens, temperature=0.0, max_tokens=8, draft_width=0, logprobs=2
    )
    model.forget()
    lead = lead_after(model.target, cases[0].tokens, plain.tokens[:7], [2, 4])
    (_, first), (_, second) = plain.logprobs[7].top[:2]
    assert lead.gap == pytest.approx(first - second, abs=1e-4)
    assert lead.noise == 0.0  # Q8_0 on the CPU with a q8_0 cache is exact to the bit
    assert not lead.is_within_rounding
    assert replace(lead, noise=lead.gap).is_within_rounding
    model.forget()
    forked = lead_after(model.target, cases[0].tokens, plain.tokens[:7], [4, 8], forked=True)
    assert forked.gap == lead.gap
    # The same tokens in other cells: as far apart as 8-bit activations take the last bit.
    assert 0 <= forked.noise < 0.2
    assert model.generate("a", max_tokens=1).stats.cached_tokens == 0


def test_spread_of_few_values_is_their_range() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0]) == Spread(2.0, 1.0, 3.0, 2)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_too_short_answers_do_not_count_for_speed(model: Model, cases: list[Case]) -> None:
    short = ask(model, cases[0].tokens, PLAIN, temperature=0.0, seed=0, max_tokens=4)
    speed = Speed.of([short])
    assert (speed.n_answers, speed.n_too_short, speed.tokens_per_second) == (1, 1, None)
    assert speed.ttft_s is not None


def test_acceptance_adds_up_and_leaves_plain_rounds_out() -> None:
    stats = Stats()
    for drafted, emitted in ((3, 1), (3, 3), (2, 3), (0, 1), (0, 1)):
        stats.record_round(drafted=drafted, emitted=emitted)
    total = Acceptance.sum([Acceptance.of([stats]), Acceptance.of([stats])])
    assert total.lengths == {1: 2, 3: 4}
    assert total.mean_length == pytest.approx(14 / 6)
    assert total.plain_rounds == 4
    assert total.widths == {1: 4, 3: 2, 4: 4}
    assert total.by_position == pytest.approx([2 / 3, 2 / 3, 0.0])
    assert Acceptance().mean_length is None


@pytest.mark.parametrize(
    ("left", "right", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)]
)
def test_first_difference(left: list[int], right: list[int], at: int | None) -> None:
    assert first_difference(left, right) == at


# What is told of it.


def test_json_has_the_fields_that_scripts_read(report: Report) -> None:
    told = json.loads(json.dumps(report.as_dict()))
    assert set(told) == {
        "format",
        "command",
        "machine",
        "settings",
        "synthetic_length",
        "text_is_valid",
        "memory_bytes",
        "rows",
        "tree_over_chain",
        "cost_curve",
        "concurrency",
        "llama_server",
        "paper",
        "n_compared",
        "n_differing",
        "n_beyond_rounding",
        "notes",
    }
    row = told["rows"][0]
    assert {"category", "temperature", "cache", "width", "shape", "plain", "drafted"} <= set(row)
    assert {"accepted_length", "accepted_lengths", "acceptance_by_position"} <= set(row)
    assert {"nodes", "depth", "branches", "side_share"} <= set(row)
    assert told["settings"]["ways"][1] == {"width": 4, "shape": "chain"}
    assert set(row["plain"]["tokens_per_second"]) == {"median", "low", "high", "n"}
    assert set(row["plain"]["stage_s"]) == set(STAGES)
    assert told["n_compared"] == 24 and told["n_differing"] == 0 and told["text_is_valid"] is True
    assert [point["rows"] for point in told["cost_curve"]] == [1, 2, 4]
    assert [(gain["temperature"], gain["width"]) for gain in told["tree_over_chain"]] == [
        (0.0, 4),
        (0.8, 4),
    ]
    assert all(gain["tokens_per_second"] > 0 for gain in told["tree_over_chain"])
    assert set(told["memory_bytes"]) == {
        "target",
        "target_cache",
        "compute",
        "drafter",
        "drafter_cache",
        "drafter_cache_limit",
    }
    assert told["memory_bytes"]["drafter_cache"] <= told["memory_bytes"]["drafter_cache_limit"]
    assert told["machine"]["target"] == "tiny-coder-q8_0.gguf"


def test_the_terminal_gets_every_section_in_plain_characters(report: Report) -> None:
    text = terminal(report)
    assert text.isascii()
    for heading in (
        "tokens/s",
        "a drafting round",
        "milliseconds a round",
        "accepted lengths",
        "memory",
        "a pass of",
    ):
        assert f"\n{heading}" in text
    assert "answers with drafts: all 24 equal plain decoding's" in text
    assert "note: a note" in text
    assert "trees over chains of 4 rows, temperature 0: " in text
    assert text.count("chat (2)") == 12
    assert "chain 4" in text and "tree 4" in text


def test_markdown_is_a_table_of_tasks_with_the_command_beside_it(report: Report) -> None:
    lines = markdown(report).splitlines()
    assert "dflash-local bench" in lines
    table = [line for line in lines if line.startswith("|")]
    assert "speed-up" in table[0] and "accepted length" in table[0] and "concurrency" in table[0]
    assert len(table) == 2 + 4
    assert len({line.count("|") for line in table}) == 1


def test_drawn_acceptance_is_said_to_be_invalid(report: Report) -> None:
    drawn = replace(report, synthetic_length=6.5)
    assert "text: invalid" in terminal(drawn)
    assert "text: invalid" in markdown(drawn)
    assert drawn.as_dict()["text_is_valid"] is False


def test_the_peer_is_held_against_the_same_prompts_and_limits(
    model: Model, cases: list[Case], rows: list[Row]
) -> None:
    speed = Spread(50.0, 50.0, 50.0, 1)
    theirs = [
        PeerRow("chat", 0.0, n, n_drafts, speed, None, None) for n in (1, 4) for n_drafts in (0, 15)
    ]
    held = held_against(theirs, rows, [])
    cold = next(row for row in rows if row.category == "chat" and row.cache == "cold")
    assert cold.drafted is not None and cold.drafted.tokens_per_second is not None
    assert cold.plain.tokens_per_second is not None
    assert held[0].ours == {PLAIN: cold.plain.tokens_per_second.median}
    assert list(held[1].ours) == [Way()]
    assert held[1].ours[Way()] == cold.drafted.tokens_per_second.median
    (told,) = held[1].as_dict()["ours"]
    assert told["over_theirs"] == pytest.approx(told["tokens_per_second"] / 50.0, rel=1e-4)
    assert [row.ours for row in held[2:]] == [{}, {}]


def test_the_peer_gets_the_models_files_and_settings(model: Model, pair: tuple[Path, Path]) -> None:
    target, draft = pair
    binary = Path(sys.executable)  # any program will do: it is not started
    peer = Peer.of(model, binary, draft, n_drafts=[15, 7], synthetic_length=4.0)
    plain, drafted = (peer.server(n, 4).command for n in peer.n_drafts[:2])
    assert str(target) in plain and str(draft) not in plain
    assert str(draft) in drafted
    assert drafted[drafted.index("-c") + 1] == str(model.n_ctx // 4 * 4)
    assert drafted[drafted.index("-t") + 1] == "1"
    given = drafted[drafted.index("--spec-synth-rates") + 1].split(",")
    assert 1 + sum(map(float, given)) == pytest.approx(4.0) and len(given) == 15
    assert "--spec-synth-rates" not in plain
