"""A new drafter with a Markov head: it learns, others read its files, and its drafts change no
answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import mini_pair
import tiny_coder
from dflash_local.convert import convert
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.shape import ShapeName
from dflash_local.engine.engine import Engine
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.loading import open_drafter
from dflash_local.target_model.target import Target
from dflash_local.tune.answers import N_LABELS, Answer
from dflash_local.tune.beginning import write_beginning
from dflash_local.tune.saving import save_checkpoint, save_gguf
from dflash_local.tune.training import Trainer, is_trained
from dflash_local.tune.weights import read_torch_drafter
from llama_drafter import LlamaDrafter
from pair_engine import open_target
from plain_answer import PlainAnswer
from reference import Reference
from shapes import exact_target
from target_texts import Text, written

torch.set_num_threads(1)  # the products are small
ROUNDING, NOISE = 5e-3, 0.05
"""Against llama.cpp, where sums round otherwise before they become 8 bits, and against the
reference, whose keys and values are no halves."""
N = 24  # tokens of an answer


@dataclass(frozen=True)
class Trained:
    """A drafter after some steps: its folder with a checkpoint, and its GGUF file."""

    folder: Path
    path: Path
    texts: list[Text]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A drafter of one layer for the tiny target, after some steps on its answers."""
    folder = tmp_path_factory.mktemp("trained")
    target = mini_pair.pair()[0]
    begin = write_beginning(folder / "begin", target, block_size=4, n_layer=1)
    spec = read_drafter(GgufFile.open(begin))
    assert (spec.family, spec.n_draft, spec.markov_rank) == ("dspark", 4, 32)
    prompts = tiny_coder.prompts()["code"]
    with open_target(
        mini_pair.pair()[0], n_ctx=1024, n_seq=4, tapped_layers=spec.target_layers
    ) as opened:
        texts = written(opened, prompts[:4], N)
    drafter = read_torch_drafter(begin, target, dtype=torch.float32)
    trainer = Trainer(drafter, low_rank=False, rate=1.0, seed=1)
    answers = [answer_of(text) for text in texts]
    seen = [trainer.step(answers, 0.0) for _ in range(24)]
    assert seen[-1] < 0.6 * seen[0]
    weights = trainer.weights()
    assert weights["markov_w2.weight"].abs().max() > 1e-3
    path = folder / "drafter.gguf"
    save_gguf(path, GgufFile.open(begin), weights, GgufFile.open(target))
    save_checkpoint(folder, begin.parent, weights, set(filter(is_trained, weights)), target)
    return Trained(folder, path, texts)


def answer_of(text: Text) -> Answer:
    tokens = torch.tensor(text.tokens)
    ids = torch.zeros(len(tokens) - text.n_prompt, N_LABELS, dtype=torch.int64)
    probs = torch.zeros(ids.shape)
    ids[:, 0], probs[:, 0] = tokens[text.n_prompt :], 1.0
    return Answer(tokens, text.n_prompt, torch.from_numpy(text.features[:-1]), ids, probs)


@pytest.fixture(scope="module")
def target(trained: Trained) -> Iterator[Target]:
    taps = read_drafter(GgufFile.open(trained.path)).target_layers
    with exact_target("tree", n_ctx=512, n_seq=2, tapped_layers=taps) as opened:
        yield opened


@pytest.mark.slow
def test_the_checkpoint_is_converted_to_the_same_file(trained: Trained, tmp_path: Path) -> None:
    result = convert(trained.folder, target=mini_pair.pair()[0], output=tmp_path / "again.gguf")
    assert (result.family, result.notes) == ("dspark", [])
    again, first = GgufFile.open(result.path), GgufFile.open(trained.path)
    assert again.tensors.keys() == first.tensors.keys()
    for name, tensor in first.tensors.items():
        assert (again.tensors[name].shape, again.tensors[name].type) == (tensor.shape, tensor.type)
    # The checkpoint is in bfloat16, so the last bit of a block's scale may differ.
    one, other = (
        read_torch_drafter(path, mini_pair.pair()[0], dtype=torch.float32).weights
        for path in (result.path, trained.path)
    )
    for name, values in other.items():
        torch.testing.assert_close(one[name], values, atol=0.02 * float(values.abs().max()), rtol=0)


@pytest.mark.parametrize("for_trees", [False, True], ids=["chains", "trees"])
def test_drafts_are_those_of_llama_cpp_and_of_the_reference(
    trained: Trained, target: Target, for_trees: bool
) -> None:
    ours = open_drafter(trained.path, target, n_seq=1, n_ctx=256, n_threads=1, for_trees=for_trees)
    theirs = LlamaDrafter(trained.path, target, n_seq=1, n_ctx=256)
    reference = Reference(trained.path, target.path)
    text, n = trained.texts[0], ours.block_size - 1
    assert n == 4
    rows, drafters = text.features.astype(np.float32), (ours, theirs)
    for drafter in (*drafters, reference):
        drafter.inject(0, rows[: text.n_prompt])
    for at in range(text.n_prompt, text.n_prompt + 6):
        anchor = text.tokens[at]
        new = rows[at - 1 : at] if at > text.n_prompt else rows[:0]
        our, their = (each.draft([DraftRequest(0, anchor, new, n)])[0] for each in drafters)
        assert our.tokens == their.tokens
        assert our.logprobs == pytest.approx(their.logprobs, abs=ROUNDING)
        reference.inject(0, new)
        for i, before in enumerate([anchor, *our.tokens[:-1]]):
            expected = reference.draft_after(0, anchor, i, before)
            assert our.logprobs[i] == pytest.approx(float(expected.max()), abs=NOISE)
            assert float(expected[our.tokens[i]]) == pytest.approx(float(expected.max()), abs=NOISE)
    ours.close()


@pytest.mark.slow
def test_answers_are_those_of_plain_decoding(trained: Trained, target: Target) -> None:
    drafter = open_drafter(trained.path, target, n_seq=2, n_ctx=512, n_threads=1, for_trees=True)
    engine = Engine(target, drafter, 2)
    ways: list[tuple[ShapeName, int]] = [("chain", 5), ("tree", 16)]
    for prompt in tiny_coder.prompts()["code"][:2]:
        plain = PlainAnswer(target, prompt, N)
        for shape, width in ways:
            found = plain.asked(engine, width, shape=shape)
            assert (found.stats.tree_rounds > 0) == (shape == "tree")
            assert found.stats.tokens_per_round > 1.2
            engine.slots.forget_all()
    drafter.close()
