"""Prompts of the published evaluation, from the hub or from a file.

They are worded as in z-lab/dflash, `dflash/benchmark.py`: one user message; the answer is not bound
to a form that a grader could read.
"""

import gzip
import json
import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.bench.prompts.prompt import BenchPrompt
from dflash_local.errors import FileError, InputError
from dflash_local.hub.trouble import transfer_errors

_TURNS = "turns"
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")


@dataclass(frozen=True)
class Dataset:
    """The place of test questions on the hub, and the texts before and after each."""

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
    # Of its two questions, the first.
    "mt-bench": Dataset("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", "prompt", "", ""),
}


def load_prompts(
    name: str, folder: Path | None = None, limit: int | None = None
) -> list[BenchPrompt]:
    """`limit` prompts of one of `DATASETS`, None for all, drawn as the evaluation draws them.

    They come from the hub, or from `folder`: a file, or a folder with one, in .jsonl, .jsonl.gz,
    .json or .parquet, with the published columns or in the form that the reference program caches.
    Raises InputError: no network, no such file in the folder, or a .parquet file and no pyarrow to
    read it.
    """
    dataset = DATASETS[name]
    path = _download(name, dataset) if folder is None else _find(name, folder)
    texts = list(_texts(path, dataset))
    if not texts:
        raise FileError(f"{path}: holds no prompts")
    if limit is not None and limit < len(texts):
        texts = random.Random(0).sample(texts, limit)
    return [BenchPrompt.question(name, text) for text in texts]


# Files


def _find(name: str, folder: Path) -> Path:
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
    parquet = path.suffix.lower() == ".parquet"
    rows = _parquet_rows(path, (dataset.column, _TURNS)) if parquet else _rows(path)
    for number, row in enumerate(rows, start=1):
        known = row if isinstance(row, dict) else {}
        text = known.get(dataset.column)
        turns = known.get(_TURNS, text)
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            yield turns[0]
        elif isinstance(text, str):
            yield dataset.before + text + dataset.after
        else:
            raise FileError(f"{path}: row {number} has no text {dataset.column!r}")


def _parquet_rows(path: Path, columns: Collection[str]) -> list[Any]:
    """Rows of a Parquet file, with those of `columns` that are in it."""
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
        import pyarrow.parquet  # noqa: F401  (whether it is installed, and works)
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
    """The file in the hub client's cache, downloaded if it is not there yet."""
    if dataset.file.endswith(".parquet"):
        _check_parquet(f"--dataset {name}")
    import huggingface_hub as hub

    failures: tuple[type[Exception], ...] = (*transfer_errors(), ValueError)
    try:
        return Path(hub.hf_hub_download(dataset.repo, dataset.file, repo_type="dataset"))
    except failures as error:
        reason = re.split(r"\n|\. ", str(error).strip())[0][:200] or type(error).__name__
        raise InputError(
            f"{dataset.repo}: cannot be fetched ({reason}); with a copy of "
            f"{Path(dataset.file).name}, or of the same rows as .jsonl, run it from a folder: "
            f"--dataset {name} --dataset-folder FOLDER"
        ) from None
