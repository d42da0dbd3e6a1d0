"""The objective of a drafter: the blocks, their labels, the weights of positions, the gradient."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from dflash_local_tune import objective
from dflash_local_tune.answers import Answer
from dflash_local_tune.drafter import TorchDrafter
from dflash_local_tune.objective import (
    Blocks,
    all_anchors,
    blocks_at,
    losses,
    n_rounds,
    outcome,
    position_weights,
    random_anchors,
)
from dflash_local_tune.training import is_trained
from dflash_local_tune.weights import read_torch_drafter
from reference import Reference
from synthetic import Markov, Selector, write_drafter, write_target

torch.set_num_threads(1)  # the products are small

N_PROMPT, N_TOKENS, N_VOCAB, K = 9, 40, 320, 4
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "window": {"sliding_window": 6, "pattern": (True, False)},
    "dspark": {"markov": Markov()},
    "dflash2": {"selector": Selector()},
}


def some_answer(
    n_features: int,
    dtype: torch.dtype = torch.float32,
    *,
    n_prompt: int = N_PROMPT,
    n_tokens: int = N_TOKENS,
) -> Answer:
    rng = np.random.default_rng(5)
    n = n_tokens - n_prompt
    return Answer(
        tokens=torch.from_numpy(rng.integers(0, N_VOCAB, n_tokens)),
        n_prompt=n_prompt,
        features=torch.from_numpy(rng.standard_normal((n_tokens - 1, n_features))).to(dtype),
        label_ids=torch.from_numpy(
            np.stack([rng.choice(N_VOCAB, K, replace=False) for _ in range(n)])
        ),
        label_probs=torch.from_numpy(rng.dirichlet(np.ones(K), n)).to(dtype),
    )


def files(folder: Path, family: str) -> tuple[Path, Path]:
    target = write_target(folder / "t.gguf", n_vocab=N_VOCAB)
    return target, write_drafter(folder / "d.gguf", target, **FAMILIES[family])


@pytest.fixture(params=FAMILIES)
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> TorchDrafter:
    target, path = files(tmp_path, request.param)
    return read_torch_drafter(path, target, dtype=torch.float64)


def test_blocks_are_what_the_answer_goes_on_with() -> None:
    answer = some_answer(4)
    other = some_answer(4, n_prompt=3, n_tokens=12)
    starts = [torch.tensor([5, 10]), torch.tensor([N_PROMPT, 20, N_TOKENS - 2])]
    both = blocks_at([other, answer], starts, 3, torch.device("cpu"))
    found = Blocks(**{name: value[3:] for name, value in vars(both).items()})
    assert found.anchors.tolist() == answer.tokens[[N_PROMPT, 20, N_TOKENS - 2]].tolist()
    assert found.tokens[1].tolist() == answer.tokens[21:24].tolist()
    assert found.before[1].tolist() == answer.tokens[20:23].tolist()
    assert found.label_ids[1, 0].tolist() == answer.label_ids[21 - N_PROMPT].tolist()
    assert found.valid.tolist() == [[True] * 3, [True] * 3, [True, False, False]]
    assert both.starts.tolist()[:2] == [5, 10]
    assert both.tokens[0].tolist() == other.tokens[6:9].tolist()
    assert torch.equal(both.label_probs[0], other.label_probs[3:6])
    assert both.valid[:3].tolist() == [[True] * 3, [True, False, False], [False] * 3]


def test_anchors_are_different_tokens_of_the_answer_that_something_follows() -> None:
    answer, generator = some_answer(4), torch.Generator().manual_seed(0)
    seen: set[int] = set()
    for _ in range(40):
        found = random_anchors(answer, 8, generator).tolist()
        assert len(set(found)) == 8
        seen |= set(found)
    assert seen == set(range(N_PROMPT, N_TOKENS - 1))
    assert len(random_anchors(answer, 500, generator)) == N_TOKENS - 1 - N_PROMPT
    assert set(all_anchors(answer).tolist()) == seen


def test_half_of_the_anchors_are_those_of_rounds() -> None:
    rounds = torch.tensor([12, 15, 20, 21, 30, 33])
    answer = replace(some_answer(3), rounds=rounds)
    for seed, n in ((1, 8), (2, 8), (3, 20), (4, 100)):
        found = random_anchors(answer, n, torch.Generator().manual_seed(seed))
        assert len(found) == len(set(found.tolist())) == min(n, N_TOKENS - 1 - N_PROMPT)
        assert torch.isin(found, rounds).sum() >= min(n // 2, len(rounds))
        assert found.min() >= N_PROMPT
        assert found.max() <= N_TOKENS - 2


def test_a_position_counts_as_much_as_the_expected_length_depends_on_it() -> None:
    chances = torch.tensor([[0.9, 0.2, 0.6, 0.4]], dtype=torch.float64)
    valid = torch.tensor([[True, True, True, False]])
    logs = (0.5 + 0.5 * chances).log().requires_grad_()
    expected = logs.exp().cumprod(dim=-1)[:, :3].sum()
    (gradient,) = torch.autograd.grad(expected, logs)
    torch.testing.assert_close(position_weights(chances, valid), gradient)


@pytest.mark.parametrize("family", ["dflash", "window"])
def test_many_blocks_at_once_are_what_the_reference_drafts_one_by_one(
    family: str, tmp_path: Path
) -> None:
    target, path = files(tmp_path, family)
    drafter = read_torch_drafter(path, target, dtype=torch.float32)
    answer = some_answer(drafter.feature_size)
    starts = torch.tensor([N_PROMPT, 17, 30, N_TOKENS - 2])
    found = outcome(drafter, [answer], [starts])
    reference = Reference(path, target)
    errors, weights, lengths = [], [], []
    for start in starts.tolist():
        reference.clear(0)
        reference.inject(0, answer.features[:start].numpy())
        rows = reference.draft(0, int(answer.tokens[start]))
        true = answer.tokens[start + 1 :][: len(rows)]
        rows = rows[: len(true)]
        places = torch.arange(len(true)) + start + 1 - N_PROMPT
        labels = answer.label_probs[places]
        errors.append(-(labels * rows.gather(1, answer.label_ids[places])).sum(-1))
        chances = rows.gather(1, true[:, None])[:, 0].exp()[None]
        weights.append(position_weights(chances, torch.ones_like(chances, dtype=torch.bool))[0])
        hits = rows.argmax(-1) == true
        lengths.append(1 + int(hits.long().cumprod(0).sum()))
    expected = sum((e * w).sum() for e, w in zip(errors, weights, strict=True))
    expected = expected / sum(w.sum() for w in weights)
    torch.testing.assert_close(found.loss, expected[None], rtol=1e-4, atol=1e-4)
    assert found.accepted.tolist() == [lengths]


def test_answers_of_one_pass_do_not_see_each_other(drafter: TorchDrafter) -> None:
    sizes = [(N_PROMPT, N_TOKENS), (20, 90), (3, 12), (40, 60)]
    answers = [
        some_answer(drafter.feature_size, torch.float64, n_prompt=n_prompt, n_tokens=n_tokens)
        for n_prompt, n_tokens in sizes
    ]
    starts = [torch.tensor(at) for at in ([9, 20, 38], [85], [3, 4, 5, 6, 7, 10], [50, 41])]
    together = outcome(drafter, answers, starts)
    for i, (answer, at) in enumerate(zip(answers, starts, strict=True)):
        alone = outcome(drafter, [answer], [at])
        torch.testing.assert_close(together.loss[i], alone.loss[0])
        assert together.accepted[i, : len(at)].tolist() == alone.accepted[0].tolist()


@pytest.mark.slow
def test_a_compiled_step_of_one_shape_learns_the_same(drafter: TorchDrafter) -> None:
    """As on a GPU: rows and blocks that only fill up change nothing, whatever the answers are, and
    nothing of it falls back to Python."""
    names = [name for name in drafter.weights if is_trained(name)]
    for name in names:
        drafter.weights[name].requires_grad_()
    table = drafter.embed(torch.arange(drafter.n_vocab))
    drafter.embed = partial(functional.embedding, weight=table)  # as on a GPU
    compiled = torch.compile(losses, backend="aot_eager", fullgraph=True, dynamic=False)
    n = drafter.feature_size
    for n_tokens in (N_TOKENS, 20):
        answers = [some_answer(n, torch.float64, n_tokens=each) for each in (n_tokens, 16)]
        starts = [torch.arange(N_PROMPT, N_PROMPT + 4), torch.tensor([N_PROMPT + 1, N_PROMPT + 3])]
        gradients = []
        for found in (
            outcome(drafter, answers, starts),
            outcome(drafter, answers, starts, n_rows=N_TOKENS + 8, n_anchors=6, of=compiled),
        ):
            torch.autograd.backward(found.loss.sum())
            gradients.append([drafter.weights[name].grad for name in names])
            for name in names:
                drafter.weights[name].grad = None
        for plain, padded in zip(*gradients, strict=True):
            assert (plain is None) == (padded is None)
            if plain is not None:
                torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-6)  # float32 logits


def test_a_round_begins_behind_what_the_one_before_it_emitted() -> None:
    assert n_rounds([3, 9, 9, 1, 2, 9]) == 3
    assert n_rounds([1, 1, 1]) == 3
    assert n_rounds([8, 1, 1]) == 1  # the answer ends within the block


def test_the_gradient_is_the_slope_of_the_loss(
    drafter: TorchDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither the positions' weights nor what the confidence head reads is there to be minimised.
    monkeypatch.setattr(objective, "position_weights", lambda chances, valid: valid.double())
    names = [name for name in drafter.weights if not name.startswith(("d2t", "conf_proj"))]
    drafter.weights = {name: drafter.weights[name].double().requires_grad_() for name in names}
    answer = some_answer(drafter.feature_size, torch.float64)
    starts = torch.tensor([N_PROMPT, 15, 16, 33])
    torch.autograd.backward(outcome(drafter, [answer], [starts]).loss[0])
    generator = torch.Generator().manual_seed(1)
    parts = ("fc", "blk.0.attn_k.", "blk.1.ffn_down", "markov_w2", "selector_hidden")
    for name in (name for name in names if name.startswith(parts)):
        weight = drafter.weights[name]
        assert weight.grad is not None
        step = 1e-4 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        sides = []
        for sign in (1, -1):
            drafter.weights[name] = (weight + sign * step).detach()
            sides.append(outcome(drafter, [answer], [starts]).loss.item())
        drafter.weights[name] = weight
        expected = float((weight.grad * step).sum())
        assert (sides[0] - sides[1]) / 2 == pytest.approx(expected, rel=3e-2, abs=1e-7), name


def test_sharper_labels_are_the_squared_chances(tmp_path: Path) -> None:
    target, draft = files(tmp_path, "dspark")
    drafter = read_torch_drafter(draft, target, dtype=torch.float32)
    answer, starts = some_answer(drafter.feature_size), [torch.tensor([12, 20])]
    squares = answer.label_probs**2
    other = replace(answer, label_probs=squares / squares.sum(dim=1, keepdim=True))
    found = outcome(drafter, [answer], starts, sharper=True).loss
    torch.testing.assert_close(found, outcome(drafter, [other], starts).loss)
    assert (found != outcome(drafter, [answer], starts).loss).all()
