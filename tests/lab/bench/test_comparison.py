"""llama-server gets the same files, settings, prompts and limits, and stands beside our numbers."""

import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

from bench_report import VARIANTS, made_report, server_row
from dflash_local import Model
from dflash_local.bench.measure.settings import PLAIN, RunSettings
from dflash_local.bench.prompts.case import Case
from dflash_local.pair import Pair, open_pair
from lab.bench.comparison import beside_ours, measure_server, server_like
from lab.bench.llama_server import LlamaServer
from lab.shapes.writer import write_pair
from llama_server_stand_in import program, requests, runs
from mini_shapes import HYBRID_HEADS
from shipped_layouts import in_layout

CASES = [Case("chat", 0, [1, 2]), Case("chat", 1, [3]), Case("code", 0, [4, 5])]


def commands(
    model: Model, pair: Pair, n_drafts: int, length: float | None
) -> tuple[list[str], dict[str, str]]:
    """The command for plain decoding in four slots, and the options of that for drafts."""
    binary = Path(sys.executable)  # any program will do: it is not started
    server_for = server_like(model, binary, pair, synthetic_length=length)
    return server_for(0, 4).command, dict(pairwise(server_for(n_drafts, 4).command))


def test_it_gets_the_models_files_and_settings(model: Model, pair: tuple[Path, Path]) -> None:
    target, draft = map(str, pair)
    plain, drafted = commands(model, open_pair(*pair), 15, 4.0)
    assert target in plain and draft not in plain and "--spec-synth-rates" not in plain
    assert (drafted["-md"], drafted["-t"]) == (draft, "1")
    assert drafted["-c"] == str(model.n_ctx // 4 * 4)
    given = drafted["--spec-synth-rates"].split(",")
    assert 1 + sum(map(float, given)) == pytest.approx(4.0) and len(given) == 15


@pytest.mark.parametrize(
    ("layout", "expected"), [("DFlash 2", "draft-dflash"), ("DSpark", "draft-dspark")]
)
def test_it_is_told_which_kind_of_drafter_it_gets(
    model: Model, tmp_path: Path, layout: str, expected: str
) -> None:
    pair = open_pair(model.target.path, in_layout(layout, tmp_path / "d.gguf"))
    assert commands(model, pair, 15, None)[1]["--spec-type"] == expected


def test_heads_are_in_the_file_that_it_has_already(model: Model, tmp_path: Path) -> None:
    pair = open_pair(write_pair(HYBRID_HEADS, "Q8_0", tmp_path, n_layer=4)[0])
    plain, drafted = commands(model, pair, 4, 2.8)
    assert "-md" not in drafted and "--spec-type" not in plain
    assert drafted["--spec-type"] == "draft-mtp"
    rates = list(map(float, drafted["--spec-synth-rates"].split(",")))
    assert len(rates) == 4 and 2.3 < 1 + sum(rates) < 2.8  # six drafts would bring 2.8


def test_each_number_of_drafts_and_slots_has_a_process(tmp_path: Path) -> None:
    told: list[str] = []

    def server_for(n_drafts: int, n_slots: int) -> LlamaServer:
        draft = Path("draft.gguf") if n_drafts else None
        options = {"n_ctx": 64, "n_gpu_layers": 0, "n_threads": 1, "n_slots": n_slots}
        return LlamaServer(program(tmp_path), Path("target.gguf"), draft, **options)

    settings = RunSettings(temperatures=(0.0,), max_tokens=16)
    rows = measure_server(server_for, [0, 15], CASES, [1, 2], settings, told.append)
    found = [(row.concurrency, row.n_drafts, row.category) for row in rows]
    assert found == [*product((1, 2), (0, 15), ("chat", "code"))]
    assert len(told) == len(rows) and len(runs(tmp_path)) == 4
    # 16 tokens in 10 passes.
    assert [row.accepted_length for row in rows[:4]] == [None, None, 1.5, 1.5]
    assert rows[0].tokens_per_second.median == 30.0
    prompts = [asked["prompt"] for asked in requests(tmp_path)[1:4]]  # after the warm-up
    assert prompts == [case.tokens for case in CASES]


def test_our_speeds_stand_beside_those_of_the_same_prompts() -> None:
    report = made_report()
    plain, drafted, at_once, elsewhere = beside_ours(
        [server_row(0), server_row(15), server_row(15, 4), replace(server_row(0), category="x")],
        report.rows,
        report.concurrency,
    )
    assert plain.ours == {PLAIN: 100.0}
    # Of the variants with the first width that was measured.
    assert drafted.ours == dict.fromkeys(VARIANTS[:2], 150.0)
    assert at_once.ours == dict.fromkeys(VARIANTS[:2], 400.0)
    assert elsewhere.ours == {}
    report.server = [drafted]
    variant = {"width": "auto", "shape": "chain", "copies": True}
    found = report.as_dict()["llama_server"][0]["ours"][0]
    assert found == {**variant, "tokens_per_second": 150.0, "over_theirs": 3.0}
