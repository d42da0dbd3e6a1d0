"""Folders and files as sources, and the target that a drafter's own files name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_local.convert.files.source import (
    fetch_drafter,
    fetch_target,
    fetch_tensors,
    target_hint,
)
from dflash_local.errors import FileError, InputError
from hub_drafter import CARD, DRAFTER, drafter_files


def test_a_local_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / DRAFTER
    folder.mkdir(parents=True)
    for name, content in drafter_files().items():
        if "/" not in name:
            (folder / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    source = fetch_drafter(DRAFTER)
    assert (source.folder, source.name, source.revision) == (Path(DRAFTER), "Tiny-DFlash", None)
    assert source.card["license"] == "mit"
    assert fetch_drafter(folder).card == source.card
    assert fetch_target(DRAFTER) == source
    assert fetch_tensors(source, ["fc.weight"]).tensors.keys() == {"fc.weight"}
    with pytest.raises(InputError, match="a local folder has no revision main; leave it out"):
        fetch_drafter(folder, revision="main")


def test_a_folder_of_the_clients_cache_keeps_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--lab--Tiny-DFlash" / "snapshots" / ("0" * 39 + "a")
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    source = fetch_drafter(folder)
    assert (source.name, source.revision) == (DRAFTER, folder.name)


def test_a_gguf_target_is_its_path(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    with pytest.raises(FileError, match=r"tiny\.gguf: no such file"):
        fetch_target(path)
    path.write_bytes(b"GGUF")
    assert fetch_target(path) == fetch_target(str(path)) == path
    with pytest.raises(FileError, match=r"holds no config\.json.*did you mean .*tiny\.gguf"):
        fetch_target(tmp_path)


@pytest.mark.parametrize(
    "source", ["nothing", "./lab/nothing", "/lab/nothing", "a/b/c", "lab/no thing", "", "a\0b/c"]
)
def test_what_can_be_no_source_is_said_at_once(source: str) -> None:
    with pytest.raises(InputError) as caught:
        fetch_drafter(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "card", "target"),
    [
        ({"speculators_config": {"verifier": {"name_or_path": "a/B"}}}, CARD, "a/B"),
        ({"speculators_config": {"verifier": {"name_or_path": "/data/B"}}}, CARD, "lab/Tiny"),
        ({"speculators_config": None, "dflash_config": []}, CARD, "lab/Tiny"),
        ({"dflash_config": {"target_model": "a/B"}}, CARD, "a/B"),
        ({"target_model_name_or_path": "a/B-8.5B"}, "", "a/B-8.5B"),
        ({}, CARD, "lab/Tiny"),
        ({}, "the target model [Qwen/Qwen3-8B](https://huggingface.co/x).", "Qwen/Qwen3-8B"),
        ({}, "the target model Qwen/Qwen3.5-27B.", "Qwen/Qwen3.5-27B"),
        ({}, "| Target model | `Qwen/Qwen3-4B` |", "Qwen/Qwen3-4B"),
        ({}, "---\nbase_model: [a/B]\n---\n", "a/B"),
        ({}, "---\r\nbase_model: a/B\r\n---\r\n", "a/B"),
        ({}, "---\nbase_model: [a/B, a/C]\n---\n", None),
        ({}, "---\nbase_model: [lab/Other-DFlash, a/C]\n---\n", "a/C"),
        ({}, "---\nbase_model: lab/Other-DFlash\n---\n", None),
        ({}, "---\nbase_model: [\n---\n", None),
        ({}, "---\n- a list\n---\n", None),
        ({}, "", None),
    ],
)
def test_the_target_is_named_by_config_or_card(
    tmp_path: Path, config: dict[str, Any], card: str, target: str | None
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_bytes(card.encode())
    assert target_hint(fetch_drafter(tmp_path), config) == target
