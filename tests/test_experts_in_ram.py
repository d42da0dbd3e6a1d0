"""Mixtures of experts, wherever these lie: drafted answers are the plain ones."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_local
from adversarial import ScriptedDrafter, right_for
from dflash_local import Model, Result
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.engine.engine import Engine
from dflash_local.errors import InputError
from dflash_local.fit.options import MAX_OUTPUT_ROWS, MAX_ROWS_AT_HOME, LoadOptions
from dflash_local.fit.plan import make_plan
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import native, runtime
from dflash_local.llama.runtime import Device
from dflash_local.llama.workers import remote_devices
from dflash_local.target_model.bare_pass import rows_of
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from gap_rule import equal_by_gap_rule, noise_of_row
from lab.shapes.writer import write_pair
from llama_log import logged
from mini_shapes import EXPERTS, GPT_OSS
from pair_engine import answer
from rpc_workers import WorkerProcess, worker_processes

EXACT = {"n_ctx": 1024, "kv_type": "q8_0", "n_threads": 1, "draft_shape": "chain", "quiet": True}
MIB = 1 << 20
HALF = EXPERTS.n_layer // 2
WIDTH = 8
PROMPTS = ("a b a b", "def add(a, b):", "1 2 3 4 5 6 7 8")


@pytest.fixture(scope="module", params=[EXPERTS, GPT_OSS], ids=lambda shape: shape.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A random mixture and its drafter, in Q8_0: equal to the bit on CPUs."""
    return list(write_pair(request.param, "Q8_0", tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with worker_processes(1) as found:
        yield found[0]


def answers(model: Model, width: int) -> list[Result]:
    """Greedy and seeded."""
    return [
        model.generate(prompt, max_tokens=24, temperature=0.8 * (i % 2), seed=i, draft_width=width)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def plain(pair: list[Path]) -> list[list[int]]:
    """The answers of the mixture with nothing moved and nothing drafted."""
    with dflash_local.load(*pair, n_gpu_layers=0, **EXACT) as model:  # type: ignore[arg-type]
        return [each.tokens for each in answers(model, 0)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "moved",
    [{}, {"n_cpu_moe": HALF}, {"cpu_moe": True}, {"override_tensor": {"ffn_down_exps": "CPU"}}],
    ids=str,
)
def test_in_q8_0_they_are_equal_to_the_bit(
    pair: list[Path], plain: list[list[int]], moved: dict[str, object]
) -> None:
    with dflash_local.load(*pair, n_gpu_layers=0, **EXACT, **moved) as model:  # type: ignore[arg-type]
        found = answers(model, WIDTH)
    assert [each.tokens for each in found] == plain
    assert sum(each.stats.drafted for each in found) > 50


def assert_drafted_as_plain(
    pair: Sequence[Path], worker: WorkerProcess | None, **moved: Any
) -> str:
    """Fail unless drafts change nothing, by the gap rule, as where routers are products in F32 on a
    worker. Returns what llama.cpp logged of the load."""
    spec = read_drafter(GgufFile.open(pair[1]))
    if worker:
        remote_devices([worker.name])
        moved |= {"rpc": [worker.name], "n_gpu_layers": EXPERTS.n_layer + 1}
    taps = spec.target_layers
    options = TargetOptions(n_ctx=512, kv_type="q8_0", n_threads=1, tapped_layers=taps, **moved)
    with logged() as log:
        target = Target(pair[0], options)
    with target:
        engine = Engine(target, FusedDrafter(pair[1], target, spec, n_seq=1, n_ctx=512))
        n_drafted = 0
        for seed in range(3):
            prompt = np.random.default_rng(seed).integers(0, EXPERTS.n_vocab, 40).tolist()
            plain = answer(engine, prompt, 0, 24, logprobs=2)
            engine.slots.forget_all()
            drafted = answer(engine, prompt, WIDTH, 24)
            engine.slots.forget_all()
            n_drafted += drafted.stats.drafted
            equal_by_gap_rule(
                plain.tokens,
                plain.logprobs,
                drafted.tokens,
                0.0,
                lambda at, p=prompt, t=plain.tokens: noise_of_row(target, p, t, at, (WIDTH, 3, 16)),
            )
    assert n_drafted > 50
    return log.getvalue()


@pytest.mark.slow
def test_in_bf16_they_differ_by_rounding_alone(tmp_path: Path) -> None:
    """Products then depend on the batch."""
    assert_drafted_as_plain(write_pair(EXPERTS, "BF16", tmp_path), None)


def held_mib(log: str) -> float:
    """MiB of the weights on a worker, as llama.cpp says."""
    return float(re.findall(r"RPC.* model buffer size = +([\d.]+) MiB", log)[-1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [HALF, EXPERTS.n_layer])
def test_layers_on_a_worker_with_experts_here(
    pair: list[Path], worker: WorkerProcess, n: int
) -> None:
    """It also takes what was planned, to the byte."""
    said: list[str] = []
    options = {**EXACT, "rpc": [worker.name], "n_cpu_moe": n, "say": said.append}
    with dflash_local.load(*pair, **options) as model:  # type: ignore[arg-type]
        plan = model.plan
        assert model.generate("a b", max_tokens=8, draft_width=WIDTH).tokens
    assert plan is not None and plan.gpus[0].layers == EXPERTS.n_layer + 1
    assert plan.experts_bytes and any("in RAM" in line for line in said)
    log = assert_drafted_as_plain(pair, worker, n_cpu_moe=n)
    assert held_mib(log) == pytest.approx(plan.gpus[0].weights / MIB, abs=0.01)


@pytest.mark.one_in(2)
def test_the_plan_s_own_choice_is_loaded_as_counted(
    pair: list[Path], worker: WorkerProcess
) -> None:
    """A worker stands in for a GPU that is too small: all layers on it, some experts here."""
    files = GgufFile.open(pair[0]), None, None
    options = LoadOptions(n_ctx=512, kv_type="q8_0")
    whole = make_plan(*files, options, [small_gpu(8000), *runtime.devices()])
    assert whole.n_cpu_moe == 0
    wanted = whole.gpus[0].needed - 4 * MIB
    margin = 512 * MIB
    chosen = make_plan(*files, options, [small_gpu((wanted + margin) / MIB), *runtime.devices()])
    assert 0 < chosen.n_cpu_moe < EXPERTS.n_layer == chosen.n_gpu_layers - 1
    held = held_mib(assert_drafted_as_plain(pair, worker, n_cpu_moe=chosen.n_cpu_moe))
    head = GgufFile.open(pair[0]).tensors
    at_home = sum(t.n_bytes for name, t in head.items() if name.startswith("output"))
    assert held * MIB + at_home + chosen.gpus[0].kv + chosen.gpus[0].compute <= wanted + MIB / 10


def small_gpu(mib: float) -> Device:
    return Device("GPU0", "", "gpu", int(mib * MIB), 8000 * MIB)


@pytest.mark.one_in(2)
def test_passes_are_wider_than_elsewhere(pair: list[Path], worker: WorkerProcess) -> None:
    """Copies may be longer: so many rows read hardly more experts than half as many."""
    n = 150
    remote_devices([worker.name])
    here = TargetOptions(n_ctx=512, kv_type="q8_0", n_threads=1, tapped_layers=(1,))
    beside = replace(here, n_gpu_layers=EXPERTS.n_layer + 1, rpc=[worker.name])
    wide = replace(beside, n_cpu_moe=HALF)
    by_name = replace(beside, override_tensor={r"\.ffn_(up|gate)_exps\.": "CPU"})
    for options, expected in (
        (here, MAX_OUTPUT_ROWS),
        (beside, MAX_OUTPUT_ROWS),
        (replace(beside, override_tensor={"attn_q": "CPU"}), MAX_OUTPUT_ROWS),
        (by_name, MAX_ROWS_AT_HOME),
    ):
        with Target(pair[0], options) as target:
            assert target.max_width == expected
    with Target(pair[0], wide) as target:
        assert target.max_width == MAX_ROWS_AT_HOME == native.most_rows_at_home
        prompt = np.random.default_rng(0).integers(0, EXPERTS.n_vocab, 40).tolist()
        engine = Engine(target, None)
        plain = answer(engine, prompt, 0, n, logprobs=2)
        engine.slots.forget_all()
        script = right_for(prompt + plain.tokens, lambda: 90, target.n_vocab)
        engine = Engine(target, ScriptedDrafter(script, block_size=MAX_ROWS_AT_HOME))
        drafted = answer(engine, prompt, 120, n)
        engine.slots.forget_all()
        assert max(drafted.stats.widths) == 120
        equal_by_gap_rule(
            plain.tokens,
            plain.logprobs,
            drafted.tokens,
            0.0,
            lambda at: noise_of_row(target, prompt, plain.tokens, at, (8, 64, 120)),
        )


@pytest.mark.one_in(2)
def test_a_draft_width_may_be_as_wide(pair: list[Path], worker: WorkerProcess) -> None:
    options = {**EXACT, "rpc": [worker.name], "draft_width": 100}
    with dflash_local.load(pair[0], n_cpu_moe=HALF, **options) as model:  # type: ignore[arg-type]
        assert model.generate("a b", max_tokens=8).tokens
    with pytest.raises(InputError, match="draft_width is 100; a verify pass allows at most 64"):
        dflash_local.load(pair[0], **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_patterns_may_name_a_worker_and_the_head_stays_here(
    pair: list[Path], worker: WorkerProcess
) -> None:
    named = f"RPC {worker.name}"
    overrides = {"ffn_(up|gate)_exps": "CPU", "ffn_down_exps|output": named}
    assert_drafted_as_plain(pair, worker, override_tensor=overrides)


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_leaves_experts_to_llama_cpp(value: str) -> None:
    """Where there are kernels of our own for this processor; their results are tested in C++."""
    code = (
        "from dflash_local.llama import native, runtime\n"
        "runtime.init()\n"
        "print(native.expert_kernels() or 'none', native.n_expert_products())"
    )
    environment = os.environ | {native.FEW_ROWS: value}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    runtime.init()
    ours = native.expert_kernels() or "none"
    expected = "none" if value == "0" else ours
    assert run.stdout.split() == [expected, str(int(expected != "none"))]


def test_a_row_of_mxfp4_experts_has_the_same_bits_beside_any_others(tmp_path: Path) -> None:
    """On a CPU they are read where they are in the file, by kernels of our own."""
    path, draft = write_pair(GPT_OSS, "MXFP4", tmp_path)
    tokens = np.random.default_rng(0).integers(0, GPT_OSS.n_vocab, 16).tolist()
    with Target.load(path, n_ctx=256, kv_type="q8_0", n_threads=2) as target:
        before = native.n_expert_products()
        whole = rows_of(target, 0, tokens, 16)
        assert (native.n_expert_products() > before) == bool(native.expert_kernels())
        for width in (1, 5):
            target.clear(0)
            np.testing.assert_array_equal(rows_of(target, 0, tokens, width), whole)
    with dflash_local.load(path, draft, n_gpu_layers=0, **EXACT) as model:
        before = native.n_expert_products()
        model.generate(PROMPTS[0], max_tokens=2)
        assert (native.n_expert_products() > before) == bool(native.expert_kernels())
