"""Prompts of the published evaluation, from the hub and from folders."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_local.bench.prompts.dataset import DATASETS, load_prompts
from dflash_local.errors import FileError, InputError
from hub_stand_in import Hub, running

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]
STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."

# The client reads its settings when it is imported, so each fetch is a process of its own.
SCRIPT = """
import json, sys
from dflash_local.bench.prompts.dataset import load_prompts
from dflash_local.errors import InputError
try:
    print(json.dumps([prompt.messages[0]["content"] for prompt in load_prompts(sys.argv[1])]))
except InputError as error:
    print(json.dumps({"error": str(error)}))
"""


def contents(name: str, *arguments: Any, **options: Any) -> list[str]:
    prompts = load_prompts(name, *arguments, **options)
    assert all(prompt.category == name for prompt in prompts)
    assert all(len(prompt.messages) == 1 for prompt in prompts)
    assert all(prompt.messages[0]["role"] == "user" for prompt in prompts)
    return [prompt.messages[0]["content"] for prompt in prompts]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


QUESTIONS = [f"{n} Bäume tragen je {n + 2} Äpfel. Wie viele Äpfel?" for n in range(40)]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as the hub's own are: of these questions, with answers."""
    path = tmp_path_factory.mktemp("parquet") / "test-00000-of-00001.parquet"
    pq.write_table(pa.table({"question": QUESTIONS, "answer": list(map(str, range(40)))}), path)
    return path


# The hub


@pytest.fixture
def hub(parquet: Path) -> Iterator[Hub]:
    with running() as hub:
        hub.add(
            f"datasets/{DATASETS['gsm8k'].repo}",
            {DATASETS["gsm8k"].file: parquet.read_bytes(), "README.md": b"#"},
        )
        yield hub


def fetched(hub: Hub, home: Path, name: str, **settings: str) -> Any:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "HUGGING_FACE_")) and "proxy" not in key.lower()
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **settings,
        },
    )
    return json.loads(done.stdout)


def test_questions_come_from_the_hub_once(hub: Hub, parquet: Path, tmp_path: Path) -> None:
    first = fetched(hub, tmp_path, "gsm8k")
    assert first == [question + STEPS for question in QUESTIONS]
    assert fetched(hub, tmp_path, "gsm8k", HF_HUB_OFFLINE="1") == first
    assert hub.served("hub", ".parquet") == [parquet.stat().st_size]


def test_without_a_network_one_line_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    answer = fetched(hub, tmp_path, "gsm8k", HF_HUB_OFFLINE="1")
    assert answer["error"].startswith("openai/gsm8k: cannot be fetched (")
    assert "--dataset gsm8k --dataset-folder FOLDER" in answer["error"]
    assert "\n" not in answer["error"]


@pytest.mark.slow
def test_a_dataset_that_is_gone_is_told(hub: Hub, tmp_path: Path) -> None:
    assert "cannot be fetched" in fetched(hub, tmp_path, "humaneval")["error"]


def test_of_two_questions_the_first_is_asked(hub: Hub, tmp_path: Path) -> None:
    rows = [{"prompt_id": n, "prompt": [f"Question {n}?", "And then?"]} for n in range(3)]
    dataset = DATASETS["mt-bench"]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    hub.add(f"datasets/{dataset.repo}", {dataset.file: lines.encode()})
    expected = [f"Question {n}?" for n in range(3)]
    assert fetched(hub, tmp_path / "home", "mt-bench") == expected
    assert contents("mt-bench", write_lines(tmp_path / "question.jsonl", rows)) == expected


# Folders


@pytest.mark.parametrize("name", ["test.jsonl", "test.json", "test.jsonl.gz", "Test.JSONL"])
def test_a_folder_serves_as_well(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / name, ROWS)
    if name.endswith(".json"):
        path.write_text(json.dumps(ROWS))
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    expected = [row["question"] + STEPS for row in ROWS]
    assert contents("gsm8k", tmp_path) == expected
    assert contents("gsm8k", path) == expected


def test_a_parquet_file_in_a_folder(parquet: Path, tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / parquet.name).write_bytes(parquet.read_bytes())
    (tmp_path / "main" / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    assert contents("gsm8k", tmp_path) == [question + STEPS for question in QUESTIONS]


def test_however_a_parquet_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "test.parquet"
    table = pa.table({"question": ["same"] * 300 + ["other"], "n": range(301)})
    pq.write_table(table, path, compression="zstd", row_group_size=100)
    assert contents("gsm8k", path) == ["same" + STEPS] * 300 + ["other" + STEPS]
    pq.write_table(pa.table({"turns": [["a", "b"], ["c"]]}), path)
    assert contents("gsm8k", path) == ["a", "c"]


@pytest.mark.parametrize(
    "columns",
    [{"prompt": ["a"]}, {"question": [5]}, {"question": [None, "a"]}, {"question": [{"a": "b"}]}],
    ids=str,
)
def test_a_parquet_file_of_other_rows_is_refused(columns: dict[str, Any], tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "test.parquet")
    with pytest.raises(FileError, match=r"test\.parquet: row 1 has no text 'question'"):
        load_prompts("gsm8k", tmp_path)


def test_a_damaged_parquet_file_is_refused(parquet: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "test.parquet", parquet.read_bytes()
    for content in (b"", b"PAR1", whole[:-9], whole[:4] + b"\xff" * (len(whole) - 4)):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"test\.parquet: cannot be read as Parquet") as found:
            load_prompts("gsm8k", path)
        assert "\n" not in str(found.value)


def test_without_pyarrow_one_line_says_what_to_install(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as import finds it where there is none
    for given, named in ((None, "--dataset gsm8k"), (parquet, str(parquet))):
        with pytest.raises(InputError) as found:
            load_prompts("gsm8k", given)
        assert str(found.value) == (
            f"{named} needs pyarrow: pip install 'dflash-local[datasets]', or give "
            "--dataset-folder with .jsonl files"
        )
    path = write_lines(tmp_path / "test.jsonl", ROWS)
    assert len(contents("gsm8k", path)) == len(ROWS)


def test_code_is_asked_for_as_in_the_evaluation(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "HumanEval.jsonl", [{"prompt": "def f(x):\n"}])
    assert contents("humaneval", path) == [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f(x):\n\n```"
    ]


def test_what_the_reference_program_caches_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "gsm8k.jsonl", [{"turns": ["What is 1 + 1?" + STEPS]}])
    assert contents("gsm8k", path) == ["What is 1 + 1?" + STEPS]


def test_of_several_files_the_one_for_the_test_is_taken(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k_train.jsonl", ROWS[:3])
    write_lines(tmp_path / "gsm8k_test.jsonl", ROWS[:5])
    write_lines(tmp_path / "mbpp_test.jsonl", ROWS[:7])
    assert len(contents("gsm8k", tmp_path)) == 5


def test_samples_repeat(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "test.jsonl", ROWS)
    drawn = contents("gsm8k", path, 8)
    assert len(set(drawn)) == 8
    assert set(drawn) < set(contents("gsm8k", path))
    assert contents("gsm8k", path, 8) == drawn
    assert contents("gsm8k", path, 100) == contents("gsm8k", path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"answer": "4"}\n', "row 1 has no text 'question'"),
        ('{"question": 5}\n', "row 1 has no text 'question'"),
        ("[1]\n", "row 1 has no text"),
        ('{"question": "a"}\n{"quest', "malformed JSON"),
        ("\n", "holds no prompts"),
        ("[" * 100_000, "malformed JSON"),
    ],
)
def test_a_file_of_other_rows_is_refused(rows: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(rows)
    with pytest.raises(FileError, match=message):
        load_prompts("gsm8k", tmp_path)


def test_a_file_that_only_looks_right_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.json").write_text("{}")
    with pytest.raises(FileError, match="no JSON array"):
        load_prompts("gsm8k", tmp_path)
    (tmp_path / "test.jsonl.gz").write_bytes(b"plain")
    with pytest.raises(FileError, match="cannot be read"):
        load_prompts("gsm8k", tmp_path / "test.jsonl.gz")


def test_a_folder_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_prompts("gsm8k", tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no \.jsonl"):
        load_prompts("gsm8k", tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        write_lines(tmp_path / name, ROWS)
    with pytest.raises(InputError, match=r"2 files could be the questions of gsm8k \(a.jsonl, b"):
        load_prompts("gsm8k", tmp_path)
