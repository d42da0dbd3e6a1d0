"""Records a pair's drafts and the target's texts, for synthetic acceptance in `bench`.

    python -m lab.record_drafts lab/replay/recorded.npz

It decodes answers to the built-in prompts, greedy ones or drawn ones. Each of their tokens is the
anchor of one draft.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypeAlias

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import numpy as np
from numpy.typing import NDArray

import tiny_coder
from dflash_local import Model
from dflash_local.bench.prompts.case import Case, tokenized
from dflash_local.bench.prompts.prompt import BenchPrompt, built_in
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.drafter import DraftRequest, WrappedDrafter
from dflash_local.engine.engine import Engine
from dflash_local.fit.options import LoadOptions
from dflash_local.loading import open_engine
from dflash_local.pair import open_pair
from lab.replay.recorded import RecordedDrafts

Passage: TypeAlias = tuple[NDArray[np.float32], NDArray[np.uint8]]
"""Log-probabilities [tokens, drafts, k] and ranks [tokens, drafts]."""


class Recorder:
    """Keeps the candidates of every round, and lets nothing be drafted."""

    def __init__(self) -> None:
        self.candidates: list[Candidates] = []

    def __call__(self, _request: DraftRequest, draft: Draft) -> Draft:
        assert draft.candidates is not None, "a draft graph gives candidates"
        self.candidates.append(draft.candidates)
        return Draft.chain([])


def record(
    model: Model,
    recorder: Recorder,
    case: Case,
    n_tokens: int,
    n_passages: int,
    temperature: float,
) -> list[Passage]:
    """One answer, cut into at most `n_passages` of `n_tokens` each."""
    assert model.drafter is not None
    n_drafts = model.drafter.block_size - 1
    recorder.candidates.clear()
    model.forget()
    result = model.generate(
        case.tokens,
        temperature=temperature,
        seed=1,
        max_tokens=n_passages * n_tokens + n_drafts + 1,
        draft_width=n_drafts + 1,
        draft_shape="chain",
    )
    # The first token comes from the prompt; the last drafts reach beyond the end of the answer.
    found: list[Passage] = []
    known = recorder.candidates[: len(result.tokens) - n_drafts]
    for begin in range(0, len(known) - n_tokens + 1, n_tokens):
        part = range(begin, begin + n_tokens)
        written = [np.array(result.tokens[at + 1 : at + 1 + n_drafts]) for at in part]
        ranks = [_ranks(known[at], tokens) for at, tokens in zip(part, written, strict=True)]
        found.append((np.array([known[at].logprobs for at in part]), np.array(ranks)))
    return found


def _ranks(candidates: Candidates, written: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The place of each written token among the candidates of its position, k if it is none."""
    hits = candidates.ids == written[:, None]
    missed = np.full(len(hits), hits.shape[1])
    return np.where(hits.any(axis=1), hits.argmax(axis=1), missed).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("file", type=Path, help="where to write, .npz")
    parser.add_argument("--target", type=Path, help="GGUF file of another target than tiny-coder")
    parser.add_argument("--draft", type=Path, help="and of its drafter")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each category")
    parser.add_argument("--passages", type=int, default=4, help="of each answer at most")
    parser.add_argument("--tokens", type=int, default=32, help="of each passage")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers")
    parser.add_argument("--threads", type=int, help="CPU threads")
    arguments = parser.parse_args()
    if arguments.target is None:
        pair = tiny_coder.pair()
        prompts = [
            BenchPrompt(kind, text=text)
            for kind, texts in tiny_coder.prompts().items()
            for text in [text for text in texts if "<|fim_" not in text][: arguments.limit]
        ]
    else:
        pair = arguments.target, arguments.draft
        prompts = built_in(("chat", "code"), limit=arguments.limit)
    options = LoadOptions(n_ctx=2048, n_threads=arguments.threads, draft_shape="tree")
    engine, plan = open_engine(open_pair(*pair), options, say=print)
    assert engine.drafter is not None
    recorder = Recorder()
    recording = Engine(engine.target, WrappedDrafter(engine.drafter, recorder), learns=False)
    with Model(recording, plan) as model:
        cases, _ = tokenized(model, prompts, room=arguments.passages * arguments.tokens)
        found = [
            passage
            for case in cases
            for passage in record(
                model,
                recorder,
                case,
                arguments.tokens,
                arguments.passages,
                arguments.temperature,
            )
        ]
    recorded = RecordedDrafts(
        np.array([logprobs for logprobs, _ in found]), np.array([ranks for _, ranks in found])
    )
    recorded.write(arguments.file)
    walks = [recorded.lengths(i, recorded.n_drafts) for i in range(recorded.n_passages)]
    mean = sum(map(sum, walks)) / sum(map(len, walks))
    print(f"{len(walks)} passages; whole chains give {mean:.2f} tokens a round")


class _Raw(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()
