"""Texts come out of Parquet files as they went in; what is not understood is said in one line.

The files in `tests/parquet` were written by pyarrow, as its defaults are and with other
compressions and page versions: 40 rows, but for those named otherwise.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dflash_local.bench.parquet import read_texts
from dflash_local.errors import FileError

FOLDER = Path(__file__).parent / "parquet"
QUESTIONS = [
    f"{i} Bäume tragen je {i + 2} Äpfel. Wie viele Äpfel? " + "lang " * (i % 7) for i in range(40)
]


@pytest.mark.parametrize(
    "name", ["snappy-dictionary", "snappy-plain", "gzip-pages-2", "none-pages-2-plain"]
)
def test_texts_come_out_as_they_went_in(name: str) -> None:
    path = FOLDER / f"{name}.parquet"
    assert read_texts(path, "question") == QUESTIONS
    assert read_texts(path, "answer") == [str(i * (i + 2)) for i in range(40)]


def test_repeated_texts_are_kept() -> None:
    assert read_texts(FOLDER / "repeats.parquet", "question") == ["same" * 50] * 300 + ["other"] * 3


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("snappy-plain", "prompt", "flat column 'prompt', found question, answer, n; convert it"),
        ("snappy-plain", "n", "column 'n' is no text; convert it to .jsonl"),
        ("zstd", "question", "compression 6, expected none, Snappy or gzip; convert it"),
        ("nulls", "question", "the column has nulls"),
        ("nested", "question", "expected a flat column 'question'"),
    ],
)
def test_what_is_not_understood_is_said(name: str, column: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_texts(FOLDER / f"{name}.parquet", column)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"{}" * 20, b"PAR1" + b"\xff" * 8 + b"PAR1"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.parquet").write_bytes(content)
    with pytest.raises(FileError):
        read_texts(tmp_path / "file.parquet", "question")
    with pytest.raises(FileError, match="cannot be read"):
        read_texts(tmp_path, "question")


@pytest.mark.parametrize("name", ["snappy-dictionary", "gzip-pages-2", "none-pages-2-plain"])
def test_damage_is_told_or_does_no_harm(name: str, tmp_path: Path) -> None:
    whole = (FOLDER / f"{name}.parquet").read_bytes()
    path, draw = tmp_path / "file.parquet", random.Random(name)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 5))):
            damaged[draw.randrange(4, len(whole) - 4)] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            read_texts(path, "question")
        except FileError as error:
            assert str(path) in str(error)
