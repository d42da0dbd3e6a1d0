"""Published pairs from the hub, end to end, beside the accepted lengths of the published tables.

`pytest -m hub` runs these; they need the network, some 30 GB of disk, and a GPU if they are to end
within the hour. Causes of a miss, the likeliest first: the chat template or its thinking mode is
not what the drafter was trained for (`stats` and `doctor` warn of few accepted drafts); the tapped
layers are others than those of its config.json (`dflash-local inspect`); the draft graph is wrong
for this architecture (`tests/draft` holds it against PyTorch). Quantising the target moves an
accepted length by some hundredths, forty prompts in place of all by two or three tenths.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest

from dflash_local import Model, load
from dflash_local.bench.prompts.dataset import load_prompts
from dflash_local.bench.prompts.prompt import BenchPrompt


def accepted_length(model: Model, prompts: Sequence[BenchPrompt]) -> float:
    """The mean over answers of their tokens a round: greedy, chains of the whole block, no copies,
    as the tables were made."""
    assert model.drafter is not None
    model.engine.offers_copies = False
    found = []
    for prompt in prompts:
        result = model.chat(
            prompt.messages,
            max_tokens=1024,
            temperature=0.0,
            draft_width=model.drafter.block_size,
            draft_shape="chain",
            chat_template_kwargs={"enable_thinking": False},
        )
        found.append(result.stats.tokens_per_round)
    return mean(found)


@pytest.mark.hub
@pytest.mark.parametrize(
    ("name", "dataset", "published"),
    [
        ("qwen3-4b", "gsm8k", 6.53),
        ("qwen3-4b", "humaneval", 6.64),
        ("qwen3-4b", "mt-bench", 4.35),
        ("qwen3-8b", "gsm8k", 6.54),
        ("qwen3-8b", "humaneval", 6.50),
        ("llama-3.1-8b", "gsm8k", 4.32),
        ("llama-3.1-8b", "humaneval", 4.91),
    ],
)
def test_a_published_pair_reaches_its_table(name: str, dataset: str, published: float) -> None:
    """Chen, Liang, Liu, arXiv 2602.06036, tables 1 and 5, at temperature 0."""
    with load(name) as model:
        found = accepted_length(model, load_prompts(dataset, 40))
    print(f"{name}, {dataset}: {found:.2f} tokens a round, published {published}")
    assert found > 0.9 * published


@pytest.mark.slow
def test_what_is_compared_is_rounds_of_whole_blocks(pair: tuple[Path, Path]) -> None:
    """The same on a small pair and questions that need no network."""
    prompts = [BenchPrompt.question("sums", f"What is {n} + {n}?") for n in range(2)]
    with load(*pair, n_gpu_layers=0) as model:
        found = accepted_length(model, prompts)
        assert model.drafter is not None
        assert 1 <= found <= model.drafter.block_size
        plain = model.generate("a", max_tokens=8, draft_width=0).stats
        assert plain.tokens_per_round == 1
