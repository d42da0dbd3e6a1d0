"""Training steps: they learn, go on after a break as if there had been none, and keep the best."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.gguf.file import GgufFile
from dflash_local_tune.answers import Answer
from dflash_local_tune.objective import outcome
from dflash_local_tune.training import (
    Measured,
    Muon,
    Trainer,
    is_trained,
    n_by_muon,
    n_low_rank,
    n_trainable,
)
from dflash_local_tune.weights import read_torch_drafter
from synthetic import write_drafter, write_target

torch.set_num_threads(1)  # the products are small

WIDE = {"n_embd": 160, "n_vocab": 320}  # wide enough for low-rank additions


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    target = write_target(tmp_path / "t.gguf", **WIDE)
    return target, write_drafter(tmp_path / "d.gguf", target, own_head=True, n_ff=160)


WAYS: dict[str, dict[str, Any]] = {
    "all": {"low_rank": False},
    "low rank": {"low_rank": True},
    "from nothing": {"low_rank": False, "from_nothing": True},
}
"""Of training, as a trainer's arguments."""


def trainer_of(files: tuple[Path, Path], way: str = "all") -> Trainer:
    drafter = read_torch_drafter(files[1], files[0], dtype=torch.float32)
    return Trainer(drafter, seed=3, **WAYS[way])


def answer_of(trainer: Trainer) -> Answer:
    """Every fourth token is the same, so that there is something to learn."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.arange(48) % 4 + 30
    return Answer(
        tokens=tokens,
        n_prompt=8,
        features=torch.randn(47, trainer.drafter.feature_size, generator=generator),
        label_ids=torch.stack([tokens[8:], tokens[8:] + 100], dim=1),
        label_probs=torch.tensor([[0.95, 0.05]]).expand(40, 2),
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", WAYS)
def test_steps_make_drafts_better(files: tuple[Path, Path], way: str) -> None:
    trainer = trainer_of(files, way)
    answer = answer_of(trainer)
    before = trainer.measure([answer])
    losses = [trainer.step([answer], 0.0) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    assert trainer.measure([answer]).length >= before.length
    assert (len(trainer.drafter.adapters) > 5) == (way == "low rank")


def test_low_rank_additions_are_part_of_the_weights(files: tuple[Path, Path]) -> None:
    trainer = trainer_of(files, "low rank")
    answer, starts = answer_of(trainer), torch.tensor([9, 20, 33])
    for _ in range(3):
        trainer.step([answer], 0.0)
    expected = outcome(trainer.drafter, [answer], [starts]).loss
    plain = trainer_of(files).drafter
    plain.weights = trainer.weights()
    torch.testing.assert_close(outcome(plain, [answer], [starts]).loss, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_goes_on_as_if_there_had_been_no_break(
    files: tuple[Path, Path], way: str, tmp_path: Path
) -> None:
    whole = trainer_of(files, way)
    answer = answer_of(whole)
    if way == "from nothing":
        whole.scale_taps([answer], keep_products=True)
    whole.measure([answer])
    for _ in range(3):
        whole.step([answer], 0.1)
    torch.save(whole.state(), tmp_path / "state.pt")
    again = trainer_of(files, way)
    again.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    for trainer in (whole, again):
        trainer.step([answer], 0.2)
        trainer.measure([answer])
    assert again.history == whole.history
    for name, value in whole.weights().items():
        torch.testing.assert_close(again.weights()[name], value, rtol=0, atol=0)


def test_the_best_weights_are_kept(files: tuple[Path, Path]) -> None:
    trainer = trainer_of(files)
    answer = answer_of(trainer)
    for _ in range(30):
        trainer.step([answer], 0.0)
    best = trainer.measure([answer])
    kept = trainer.weights()
    with torch.no_grad():
        trainer.mean["output_norm.weight"].mul_(-1)  # the likeliest is the least likely
    assert trainer.measure([answer]).length < best.length
    trainer.use_best()
    for name, value in trainer.weights().items():
        torch.testing.assert_close(value, kept[name], rtol=0, atol=0)


def test_the_training_ends_where_it_gains_nothing_for_half_of_it(files: tuple[Path, Path]) -> None:
    trainer = trainer_of(files)
    trainer.history = [Measured(0, 3.0), Measured(50, 3.2), Measured(100, 3.1)]
    trainer.step_number = 100
    assert not trainer.is_flat(0.9)
    trainer.history.append(Measured(200, 3.2))  # no gain
    trainer.step_number = 200
    assert not trainer.is_flat(0.6)
    assert trainer.is_flat(0.7)  # 150 of 200 steps without a gain, of a run that is at 0.7
    trainer.history.append(Measured(250, 3.3))
    trainer.step_number = 250
    assert not trainer.is_flat(0.9)


def test_what_is_measured_and_kept_is_the_mean_of_the_weights(files: tuple[Path, Path]) -> None:
    trainer = trainer_of(files)
    answer = answer_of(trainer)
    for _ in range(5):
        trainer.step([answer], 0.0)
    last = {name: value.clone() for name, value in trainer.weights().items()}
    trainer.measure([answer])
    for name, value in trainer.weights().items():  # the steps go on from the last weights
        torch.testing.assert_close(value, last[name], rtol=0, atol=0)
    trainer.use_best()
    found = trainer.weights()
    for name, value in trainer.mean.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    assert any((found[name] != last[name]).any() for name in trainer.mean)


def test_what_is_shared_with_the_target_is_not_trained(files: tuple[Path, Path]) -> None:
    trainer = trainer_of(files)
    names = {"output.weight", "token_embd.weight", "d2t", "rope_freqs.weight", "fc.scale"}
    assert not any(map(is_trained, names))
    assert is_trained("blk.0.attn_output.weight")
    before = trainer.drafter.head.clone()
    trainer.step([answer_of(trainer)], 0.0)
    torch.testing.assert_close(trainer.drafter.head, before, rtol=0, atol=0)


@pytest.mark.parametrize(("way", "counted"), [("all", n_trainable), ("low rank", n_low_rank)])
def test_what_is_trained_is_counted_beforehand(
    files: tuple[Path, Path], way: str, counted: Callable[[GgufFile], int]
) -> None:
    assert counted(GgufFile.open(files[1])) == trainer_of(files, way).n_trained


def test_the_momenta_are_as_many_as_were_planned(files: tuple[Path, Path]) -> None:
    trainer = trainer_of(files, "from nothing")
    trainer.step([answer_of(trainer)], 0.0)
    adam, muon = (each["state"].values() for each in trainer.state()["optimizers"])
    n = sum(each["momentum"].numel() for each in muon)
    assert n == n_by_muon(GgufFile.open(files[1]))
    assert n + sum(each["exp_avg"].numel() for each in adam) == trainer.n_trained


def test_muon_moves_all_directions_alike() -> None:
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(24, 8, generator=generator).requires_grad_() for _ in range(3)]
    before = [each.detach().clone() for each in weights]
    muon = Muon(weights)
    muon.param_groups[0]["lr"] = 0.1
    for each in weights:
        each.grad = torch.randn(24, 8, generator=generator)
        each.grad[:, 0] *= 100
    muon.step()
    for old, new in zip(before, weights, strict=True):
        sizes = torch.linalg.svdvals((old - new).detach()) / (0.1 * 0.2 * 24**0.5)
        assert 0.6 < float(sizes.min()) <= float(sizes.max()) < 1.3


def test_the_rate_from_nothing_falls_to_zero(files: tuple[Path, Path]) -> None:
    trainer = trainer_of(files, "from nothing")
    before = trainer.weights()
    trainer.step([answer_of(trainer)], 1.0)
    for name, value in trainer.weights().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_the_size_of_the_taps_is_part_of_the_weights(files: tuple[Path, Path]) -> None:
    trainer = trainer_of(files, "from nothing")
    answer, starts = answer_of(trainer), torch.tensor([9, 20, 33])
    answer = replace(
        answer, features=answer.features * torch.arange(1, trainer.drafter.feature_size + 1)
    )
    first = outcome(trainer.drafter, [answer], [starts]).loss
    trainer.scale_taps([answer], keep_products=True)
    torch.testing.assert_close(outcome(trainer.drafter, [answer], [starts]).loss, first)
    for _ in range(3):
        trainer.step([answer], 0.0)
    trained = outcome(trainer.drafter, [answer], [starts]).loss
    assert trained < first
    plain = trainer_of(files).drafter
    plain.weights = trainer.weights()
    torch.testing.assert_close(outcome(plain, [answer], [starts]).loss, trained)
    trainer.measure([answer])
    plain.weights = trainer.weights(best=True)
    trainer.use_best()
    found = trainer.weights()
    for name, value in plain.weights.items():
        torch.testing.assert_close(found[name], value)
