"""Prompts of the published evaluation, from the hub."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from convert_command import online, settings
from dflash_local.bench.prompts.dataset import DATASETS, load_prompts
from dflash_local.errors import InputError
from hub_stand_in import Hub, running
from ready_command import ReadyRun

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
QUESTIONS = [f"{n} Bäume tragen je {n + 2} Äpfel. Wie viele Äpfel?" for n in range(40)]

# The client reads its settings when it is imported, so each fetch is a process of its own.
SCRIPT = """
import json, sys
from dflash_local.bench.prompts.dataset import load_prompts
from dflash_local.errors import DflashError
try:
    limit = int(sys.argv[2]) or None
    prompts = load_prompts(sys.argv[1], limit)
    assert all(prompt.category == sys.argv[1] for prompt in prompts)
    assert all([message["role"] for message in prompt.messages] == ["user"] for prompt in prompts)
    print(json.dumps([prompt.messages[0]["content"] for prompt in prompts]))
except DflashError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        yield hub


Fetch = Callable[..., Any]


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Fetch:
    """Asks for the prompts of a dataset, whose file on the hub is `data` from then on."""

    def fetched(name: str, data: bytes | None = None, limit: int = 0, **more: str) -> Any:
        dataset = DATASETS[name]
        if data is not None:
            hub.add(f"datasets/{dataset.repo}", {dataset.file: data, "README.md": b"#"})
        environment = settings({**online(hub, tmp_path / "home"), **more})
        done = ReadyRun("-c", SCRIPT, name, str(limit), environment=environment).finish()
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return fetched


def table(**columns: Any) -> bytes:
    """A file as the hub's own are."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


SUMS = table(question=QUESTIONS, answer=list(map(str, range(40))))


@pytest.mark.slow
def test_questions_come_from_the_hub_once(hub: Hub, fetch: Fetch) -> None:
    first = fetch("gsm8k", SUMS)
    assert first == [question + STEPS for question in QUESTIONS]
    assert fetch("gsm8k", HF_HUB_OFFLINE="1") == first
    assert hub.served("hub", ".parquet") == [len(SUMS)]
    drawn = fetch("gsm8k", limit=8)
    assert len(set(drawn)) == 8 and set(drawn) < set(first)
    assert fetch("gsm8k", limit=8) == drawn
    assert fetch("gsm8k", limit=100) == first


def test_without_a_network_one_line_says_why(fetch: Fetch) -> None:
    error = fetch("gsm8k", SUMS, HF_HUB_OFFLINE="1")["error"]
    assert error.startswith("datasets/openai/gsm8k: offline") and "\n" not in error


@pytest.mark.slow
def test_a_dataset_that_is_gone_is_told(fetch: Fetch) -> None:
    assert "no such repository" in fetch("humaneval")["error"]


def test_of_two_questions_the_first_is_asked(fetch: Fetch) -> None:
    rows = [{"prompt_id": n, "prompt": [f"Question {n}?", "And then?"]} for n in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert fetch("mt-bench", lines.encode()) == [f"Question {n}?" for n in range(3)]


def test_code_is_asked_for_as_in_the_evaluation(fetch: Fetch) -> None:
    assert fetch("humaneval", table(prompt=["def f(x):\n"])) == [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f(x):\n\n```"
    ]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("gsm8k", table(prompt=["a"])),
        ("gsm8k", table(question=[5])),
        ("gsm8k", table(question=[None, "a"])),
        ("gsm8k", b"PAR1"),
        ("gsm8k", SUMS[:4] + b"\xff" * (len(SUMS) - 4)),
        ("mt-bench", b'{"prompt": ["a"]}\n{"prom'),
        ("mt-bench", b'{"question": "a"}\n'),
        ("mt-bench", b'{"prompt": []}\n'),
    ],
)
def test_a_file_without_questions_is_refused(fetch: Fetch, name: str, data: bytes) -> None:
    error = fetch(name, data)["error"]
    assert f"holds no questions of {name}: " in error and "\n" not in error


def test_without_pyarrow_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as import finds it where there is none
    with pytest.raises(InputError) as found:
        load_prompts("gsm8k")
    assert str(found.value) == (
        "--dataset gsm8k needs pyarrow: pip install 'dflash-local[datasets]'"
    )
