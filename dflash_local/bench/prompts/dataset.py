"""Prompts of the published evaluation, from the hub.

They are worded as in z-lab/dflash, `dflash/benchmark.py`: one user message; the answer is not bound
to a form that a grader could read.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from dflash_local.bench.prompts.prompt import BenchPrompt
from dflash_local.errors import FileError, InputError
from dflash_local.hub.trouble import one_line


@dataclass(frozen=True)
class Dataset:
    """Test questions on the hub, the first of each row, and the texts before and after each."""

    repo: str
    file: str
    column: str
    before: str
    after: str


DATASETS: dict[str, Dataset] = {
    "gsm8k": Dataset(
        "openai/gsm8k",
        "main/test-00000-of-00001.parquet",
        "question",
        "",
        "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ),
    "humaneval": Dataset(
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        "prompt",
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\n",
        "\n```",
    ),
    "mt-bench": Dataset("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", "prompt", "", ""),
}


def load_prompts(name: str, limit: int | None = None) -> list[BenchPrompt]:
    """`limit` prompts of one of `DATASETS`, None for all, drawn as the evaluation draws them.

    They come from the hub, or from its client's cache. Raises InputError: no network, or no pyarrow
    to read a .parquet file; FileError for a file without such questions.
    """
    dataset = DATASETS[name]
    if dataset.file.endswith(".parquet"):
        try:
            import pyarrow.parquet  # noqa: F401  (whether it is installed, and works)
        except ImportError:
            install = "pip install 'dflash-local[datasets]'"
            raise InputError(f"--dataset {name} needs pyarrow: {install}") from None
    import huggingface_hub as hub

    with one_line(f"datasets/{dataset.repo}", None):
        path = Path(hub.hf_hub_download(dataset.repo, dataset.file, repo_type="dataset"))
    try:
        rows = _rows(path, dataset.column)
        firsts = [row[0] if isinstance(row, list) else row for row in rows]
        texts = [dataset.before + text + dataset.after for text in firsts]
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise FileError(f"{path}: holds no questions of {name}: {reason}") from None
    if limit is not None and limit < len(texts):
        texts = random.Random(0).sample(texts, limit)
    return [BenchPrompt.question(name, text) for text in texts]


def _rows(path: Path, column: str) -> list[str | list[str]]:
    if path.suffix != ".parquet":
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)[column] for line in lines]
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        found: list[str | list[str]] = file.read(columns=[column])[column].to_pylist()
    return found
