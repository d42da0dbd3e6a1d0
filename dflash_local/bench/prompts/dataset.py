"""Prompts of the published evaluation, and what the paper reports for them.

Prompts are put as in z-lab/dflash, `dflash/benchmark.py`: one user message, the answer not limited
to a form that a grader could read. Values are those of Chen, Liang, Liu, "DFlash: Block Diffusion
for Flash Speculative Decoding", arXiv 2602.06036: table 1 (Transformers on an H200, thinking off),
table 3 and table 5 (SGLang on a B200, one request at once). Speed-ups depend on program and
machine; the accepted length is what another program must reach, too.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.bench.prompts.case import Prompt
from dflash_local.errors import FileError, InputError

if TYPE_CHECKING:
    from dflash_local.bench.report.report import PaperValue

_TURNS = "turns"
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")


@dataclass(frozen=True)
class Dataset:
    """Where its test questions are on the hub, in which column, and how a model is asked them."""

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
}

_TABLE_1 = "arXiv 2602.06036, table 1 (Transformers, H200)"
_TABLE_3 = "arXiv 2602.06036, table 3 (SGLang, B200)"
_TABLE_5 = "arXiv 2602.06036, table 5 (SGLang, B200)"

# (target, dataset, temperature): speed-up, accepted length, source
_PAPER: dict[tuple[str, str, float], tuple[float, float, str]] = {
    ("qwen3-4b", "gsm8k", 0.0): (5.15, 6.53, _TABLE_1),
    ("qwen3-4b", "humaneval", 0.0): (5.21, 6.64, _TABLE_1),
    ("qwen3-8b", "gsm8k", 0.0): (5.15, 6.54, _TABLE_1),
    ("qwen3-8b", "humaneval", 0.0): (5.14, 6.50, _TABLE_1),
    ("qwen3-4b", "gsm8k", 1.0): (4.71, 6.00, _TABLE_1),
    ("qwen3-4b", "humaneval", 1.0): (4.74, 6.04, _TABLE_1),
    ("qwen3-8b", "gsm8k", 1.0): (4.67, 5.98, _TABLE_1),
    ("qwen3-8b", "humaneval", 1.0): (4.32, 5.52, _TABLE_1),
    ("qwen3-coder-30b-a3b", "humaneval", 0.0): (3.5, 8.09, _TABLE_3),
    ("llama-3.1-8b", "gsm8k", 0.0): (2.4, 4.32, _TABLE_5),
    ("llama-3.1-8b", "humaneval", 0.0): (2.8, 4.91, _TABLE_5),
}
_TARGETS = {
    "qwen3-4b": re.compile(r"qwen-?3-4b\b"),
    "qwen3-8b": re.compile(r"qwen-?3-8b\b"),
    "qwen3-coder-30b-a3b": re.compile(r"qwen-?3-coder-30b-a3b\b"),
    "llama-3.1-8b": re.compile(r"llama-?3\.1-8b-instruct\b"),
}
# other models of the same size, for which these drafters were not trained
_OTHERS = re.compile(
    r"2507|thinking|base\b|distill|deepseek|r1\b|abliterated|uncensored|embedding|reranker|guard"
)


def load_prompts(
    name: str, folder: Path | None = None, limit: int | None = None, *, seed: int = 0
) -> list[Prompt]:
    """`limit` prompts of a dataset, None for all, drawn by `seed` as the evaluation draws them.

    From the hub, or from `folder`: a file, or a folder with one, in .jsonl, .jsonl.gz, .json or
    .parquet, of the published columns or of the form that the reference program caches. Raises
    InputError: no such dataset, no network, nothing of the kind in the folder, a .parquet file
    without pyarrow to read it.
    """
    if name not in DATASETS:
        raise InputError(f"no dataset {name!r}; expected one of {', '.join(DATASETS)}")
    if limit is not None and limit < 1:
        raise InputError(f"{limit} prompts of {name}; expected 1 or more")
    dataset = DATASETS[name]
    path = _download(name, dataset) if folder is None else _find(name, folder)
    texts = list(_texts(path, dataset))
    if not texts:
        raise FileError(f"{path}: holds no prompts")
    if limit is not None and limit < len(texts):
        texts = random.Random(seed).sample(texts, limit)
    return [Prompt(name, messages=({"role": "user", "content": text},)) for text in texts]


def paper_value(dataset: str, target: str, temperature: float = 0.0) -> PaperValue | None:
    """What the paper reports for the target of that name, or file name, with its drafter; None
    where it reports nothing."""
    from dflash_local.bench.report.report import PaperValue

    name = re.sub(r"[\s_-]+", "-", Path(target).name.lower())
    if _OTHERS.search(name):
        return None
    for known, pattern in _TARGETS.items():
        found = _PAPER.get((known, dataset, float(temperature)))
        if found and pattern.search(name):
            speed_up, accepted_length, source = found
            return PaperValue(source, speed_up, accepted_length)
    return None


# Files


def _find(name: str, folder: Path) -> Path:
    """The file of test questions at `folder`."""
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder, expected one with the questions of {name}")
    files = sorted(path for path in folder.rglob("*") if path.name.lower().endswith(_SUFFIXES))
    named = [path for path in files if name in str(path.relative_to(folder)).lower()] or files
    tests = [path for path in named if "test" in path.name.lower()] or named
    if len(tests) == 1:
        return tests[0]
    kinds = ", ".join(_SUFFIXES)
    if not tests:
        raise InputError(f"{folder}: holds no {kinds} file, expected the questions of {name}")
    shown = ", ".join(path.name for path in tests[:4])
    raise InputError(
        f"{folder}: {len(tests)} files could be the questions of {name} ({shown}); give the file"
    )


def _texts(path: Path, dataset: Dataset) -> Iterator[str]:
    """User messages."""
    parquet = path.suffix.lower() == ".parquet"
    rows = _parquet_rows(path, (dataset.column, _TURNS)) if parquet else _rows(path)
    for number, row in enumerate(rows, start=1):
        turns = row.get(_TURNS) if isinstance(row, dict) else None
        text = row.get(dataset.column) if isinstance(row, dict) else None
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            yield turns[0]
        elif isinstance(text, str):
            yield dataset.before + text + dataset.after
        else:
            raise FileError(f"{path}: row {number} has no text {dataset.column!r}")


def _parquet_rows(path: Path, columns: Collection[str]) -> list[Any]:
    """Rows of a Parquet file, with those of `columns` that it has."""
    _check_parquet(str(path))
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            found = [name for name in file.schema_arrow.names if name in columns]
            rows: list[Any] = file.read(columns=found).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise FileError(f"{path}: cannot be read as Parquet: {reason}") from None
    return rows


def _check_parquet(name: str) -> None:
    try:
        import pyarrow.parquet  # noqa: F401  (whether it is there, and works)
    except ImportError:
        raise InputError(
            f"{name} needs pyarrow: pip install 'dflash-local[datasets]', or give "
            "--dataset-folder with .jsonl files"
        ) from None


def _rows(path: Path) -> list[Any]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix.lower() == ".gz" else data).decode()
        if path.suffix.lower() != ".json":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        rows = json.loads(text)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be read: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: malformed JSON ({error})") from None
    if not isinstance(rows, list):
        raise FileError(f"{path}: holds no JSON array, expected one of rows")
    return rows


def _download(name: str, dataset: Dataset) -> Path:
    """The file in the hub client's cache, fetched where it is not there yet."""
    _check_parquet(f"--dataset {name}")
    import huggingface_hub as hub

    try:
        return Path(hub.hf_hub_download(dataset.repo, dataset.file, repo_type="dataset"))
    except _client_errors() as error:
        reason = re.split(r"\n|\. ", str(error).strip())[0][:200] or type(error).__name__
        raise InputError(
            f"{dataset.repo}: cannot be fetched ({reason}); with a copy of "
            f"{Path(dataset.file).name}, or of the same rows as .jsonl, run it from a folder: "
            f"--dataset {name} --dataset-folder FOLDER"
        ) from None


def _client_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # its HTTP library, which differs between versions, comes with the base class
    return (OSError, ValueError, HfHubHTTPError.__bases__[0])
