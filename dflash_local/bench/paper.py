"""The paper's results, to be shown beside one's own numbers.

Values are those of Chen, Liang, Liu, "DFlash: Block Diffusion for Flash Speculative Decoding",
arXiv 2602.06036: table 1 (Transformers on an H200, thinking off), tables 3 and 5 (SGLang on a B200,
one request at a time). Speed-ups depend on program and machine. Accepted lengths do not: another
program must reach them too.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PaperValue:
    """The published result of a pair on a dataset."""

    source: str
    speed_up: float
    accepted_length: float


_TABLE_1 = "arXiv 2602.06036, table 1 (Transformers, H200)"
_TABLE_3 = "arXiv 2602.06036, table 3 (SGLang, B200)"
_TABLE_5 = "arXiv 2602.06036, table 5 (SGLang, B200)"

# By target, dataset and temperature.
_PAPER: dict[tuple[str, str, float], PaperValue] = {
    ("qwen3-4b", "gsm8k", 0.0): PaperValue(_TABLE_1, 5.15, 6.53),
    ("qwen3-4b", "humaneval", 0.0): PaperValue(_TABLE_1, 5.21, 6.64),
    ("qwen3-8b", "gsm8k", 0.0): PaperValue(_TABLE_1, 5.15, 6.54),
    ("qwen3-8b", "humaneval", 0.0): PaperValue(_TABLE_1, 5.14, 6.50),
    ("qwen3-4b", "gsm8k", 1.0): PaperValue(_TABLE_1, 4.71, 6.00),
    ("qwen3-4b", "humaneval", 1.0): PaperValue(_TABLE_1, 4.74, 6.04),
    ("qwen3-8b", "gsm8k", 1.0): PaperValue(_TABLE_1, 4.67, 5.98),
    ("qwen3-8b", "humaneval", 1.0): PaperValue(_TABLE_1, 4.32, 5.52),
    ("qwen3-coder-30b-a3b", "humaneval", 0.0): PaperValue(_TABLE_3, 3.5, 8.09),
    ("llama-3.1-8b", "gsm8k", 0.0): PaperValue(_TABLE_5, 2.4, 4.32),
    ("llama-3.1-8b", "humaneval", 0.0): PaperValue(_TABLE_5, 2.8, 4.91),
}
_TARGETS = {
    "qwen3-4b": re.compile(r"qwen-?3-4b\b"),
    "qwen3-8b": re.compile(r"qwen-?3-8b\b"),
    "qwen3-coder-30b-a3b": re.compile(r"qwen-?3-coder-30b-a3b\b"),
    "llama-3.1-8b": re.compile(r"llama-?3\.1-8b-instruct\b"),
}
# Other models of the same size: these drafters were not trained for them.
_OTHERS = re.compile(
    r"2507|thinking|base\b|distill|deepseek|r1\b|abliterated|uncensored|embedding|reranker|guard"
)


def paper_value(dataset: str, target: str, temperature: float = 0.0) -> PaperValue | None:
    """The paper's result for a target with its drafter, by its name or file name, if any."""
    name = re.sub(r"[\s_-]+", "-", Path(target).name.lower())
    if _OTHERS.search(name):
        return None
    for known, pattern in _TARGETS.items():
        found = _PAPER.get((known, dataset, temperature))
        if found and pattern.search(name):
            return found
    return None
