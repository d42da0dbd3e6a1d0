"""The shipped drafter, written in its published layout, comes back from `dflash-local convert`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest

import shipped_drafter
from convert_command import COMMAND, DRAFTER, TARGET, converted, online
from dflash_local.gguf.file import GgufFile
from hub_stand_in import Hub, running
from tokenizer_files import Files, hf_files


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped drafter in its published layout: the values that its Q8_0 file holds."""
    return shipped_drafter.write(tmp_path_factory.mktemp("shipped") / "tiny-coder-dflash")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the command runs: empty."""
    work = tmp_path / "work"
    work.mkdir()
    return work


@pytest.mark.slow
def test_the_shipped_drafter_comes_back(shipped: Path, folder: Path) -> None:
    path = converted(shipped, "--target", TARGET, folder=folder).stdout.strip()
    ours = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / path).tensors}
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(DRAFTER).tensors}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].tensor_type == tensor.tensor_type
        assert np.array_equal(ours[name].data, tensor.data), name
    keys, known = GgufFile.open(folder / path).metadata, GgufFile.open(DRAFTER).metadata
    described = {name for name in known if name.startswith(("dflash.", "tokenizer."))}
    assert {name: keys[name] for name in described} == {name: known[name] for name in described}


@pytest.mark.slow
def test_it_drafts_as_the_shipped_one(shipped: Path, folder: Path) -> None:
    path = converted(shipped, "--target", TARGET, folder=folder).stdout.strip()
    options = ("complete", "--json", "-q", "-n", "48", "--draft-width", "16", "--gpu-layers", "0")
    answers = []
    for draft in (folder / path, DRAFTER):
        done = subprocess.run(
            [COMMAND, *options, "--target", TARGET, "--draft", draft, "def fib(n):"],
            capture_output=True,
            check=True,
        )
        answers.append(json.loads(done.stdout))
    ours, theirs = answers
    assert ours["tokens"] == theirs["tokens"]
    assert ours["stats"]["accepted_lengths"] == theirs["stats"]["accepted_lengths"]
    assert ours["stats"]["accepted"] > 0


def publish(hub: Hub, drafter: Path, target: Path) -> str:
    """Put both on the hub, the target's tokenizer alone; the drafter's commit."""
    files: Files = hf_files(GgufFile.open(target))
    files["config.json"] |= {"hidden_size": 512, "num_hidden_layers": 8}
    hub.add("lab/Tiny", {name: json.dumps(content).encode() for name, content in files.items()})
    held = {path.name: path.read_bytes() for path in drafter.iterdir()}
    held["README.md"] = b"---\nlicense: mit\nbase_model: lab/Tiny\n---\n# A drafter\n"
    return hub.add("lab/Tiny-DFlash", held)


@pytest.mark.slow
def test_a_hub_id_needs_nothing_else(shipped: Path, folder: Path, tmp_path: Path) -> None:
    with running() as hub:
        commit = publish(hub, shipped, TARGET)
        home = online(hub, tmp_path / "home")
        done = converted("lab/Tiny-DFlash", "--json", folder=folder, environment=home)
        told = json.loads(done.stdout)
        assert told["path"] == "tiny-dflash-q8_0.gguf"
        assert (told["source"], told["revision"], told["target"]) == (
            "lab/Tiny-DFlash",
            commit,
            "lab/Tiny",
        )
        assert "lab/Tiny, as the drafter says" in done.stderr
        assert done.stderr.splitlines()[-1].endswith("where TARGET.gguf is lab/Tiny in GGUF")
        # once more, with no network: the cache holds all of it, and the bytes are the same
        again = converted(
            "lab/Tiny-DFlash",
            "--revision",
            commit,
            "-o",
            "again.gguf",
            folder=folder,
            environment={**home, "HF_HUB_OFFLINE": "1"},
        )
        assert again.stdout == "again.gguf\n"
        assert (folder / "again.gguf").read_bytes() == (folder / told["path"]).read_bytes()
