"""A source is a folder, a file, or a repository of the hub, which its real client fetches, or one
line says why not."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from dflash_local.convert.files.checkpoint import Checkpoint
from dflash_local.convert.files.source import fetch_drafter
from dflash_local.errors import InputError
from dflash_local.pairs.conversion import target_hint
from hub_client import Client
from hub_stand_in import Hub, Request

DRAFTER = "lab/Tiny-DFlash"
CARD = """---
license: mit
base_model: lab/Tiny-Base
tags: [dflash]
---
# Tiny

This model is the **drafter** component. It must be used in conjunction with the target model
`lab/Tiny`. It was trained with a context length of 4096 tokens.
"""
WEIGHTS = save({"fc.weight": torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)})
TARGET = "lab/Tiny"
# The client writes 10 MB at a time: of what a broken transfer brought, it keeps whole pieces.
LARGE = save({"fc.weight": torch.arange(10_000_000, dtype=torch.float32)})


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    home = tmp_path / "home"
    home.mkdir()
    return Client(hub, home)


def drafter_files() -> dict[str, bytes]:
    return {
        ".gitattributes": b"*.safetensors filter=lfs",
        "README.md": CARD.encode(),
        "config.json": b'{"model_type": "qwen3"}',
        "model.safetensors": WEIGHTS,
        "modeling_dflash.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "assets/picture.png": b"png",
    }


def sharded_files() -> dict[str, bytes]:
    """Two shards; `fc.weight` is in the second, which is WEIGHTS."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = {"weight_map": {"norm.weight": first, "fc.weight": second}}
    files = drafter_files()
    del files["model.safetensors"]
    return files | {
        "model.safetensors.index.json": json.dumps(index).encode(),
        first: save({"norm.weight": torch.ones(8)}),
        second: WEIGHTS,
        "adapter.safetensors": save({"other": torch.ones(8)}),
    }


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Folders and files.


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
    with pytest.raises(InputError, match="a local folder has no revision main; leave it out"):
        fetch_drafter(folder, revision="main")


def test_a_folder_of_the_clients_cache_keeps_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--lab--Tiny-DFlash" / "snapshots" / ("0" * 39 + "a")
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    source = fetch_drafter(folder)
    assert (source.name, source.revision) == (DRAFTER, folder.name)


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
        ({}, "---\na: &a [x, x]\nbase_model: [[*a, *a], a/C]\n---\n", "a/C"),
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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_a_card_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "README.md")
    assert fetch_drafter(tmp_path).card == {}


# The hub.


def test_a_drafter_comes_with_what_is_needed_and_nothing_else(hub: Hub, client: Client) -> None:
    commit = hub.add(DRAFTER, drafter_files())
    client.environment["TQDM_POSITION"] = "-1"  # progress bars even without a terminal
    source = client.fetch(DRAFTER)
    assert (source.name, source.revision, source.folder.name) == (DRAFTER, commit, commit)
    assert names(source.folder) == {"README.md", "config.json", "model.safetensors"}
    assert source.card["base_model"] == "lab/Tiny-Base"
    assert (source.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "model.safetensors" in client.stderr
    served = hub.served("storage")
    assert served == [len(WEIGHTS)]
    # the second time, nothing is transferred
    assert client.fetch(DRAFTER) == source
    assert hub.served("storage") == served


def test_shards_come_by_the_index_and_a_mask_embedding_with_them(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, sharded_files() | {"mask_embedding.pt": b"zip"})
    source = client.fetch(DRAFTER)
    assert names(source.folder) == {
        "README.md",
        "config.json",
        "mask_embedding.pt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert Checkpoint.open(source.folder).tensors.keys() == {"norm.weight", "fc.weight"}


@pytest.mark.slow
def test_a_revision_is_pinned(hub: Hub, client: Client) -> None:
    old = hub.add(DRAFTER, drafter_files())
    new = hub.add(DRAFTER, drafter_files() | {"config.json": b'{"new": 1}'})
    hub.repositories[DRAFTER].refs["v1"] = old
    for revision, commit in ((None, new), ("main", new), ("v1", old), (old, old)):
        source = client.fetch(DRAFTER, revision=revision)
        assert source.revision == source.folder.name == commit
        files = hub.repositories[DRAFTER].commits[commit]
        assert (source.folder / "config.json").read_bytes() == files["config.json"]
    message = client.refusal(DRAFTER, revision="v2")
    assert message.startswith(f"{DRAFTER}: has no revision v2")


@pytest.mark.slow
def test_a_transfer_that_breaks_goes_on(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, drafter_files() | {"model.safetensors": LARGE})
    hub.breaks = [25_000_000, 12_000_000]
    source = client.fetch(DRAFTER)
    assert (source.folder / "model.safetensors").read_bytes() == LARGE
    first, second, third = (request for request in hub.requests if request.server == "storage")
    assert first.range is None and first.n_bytes == 25_000_000
    assert 20_000_000 <= start(second) <= 25_000_000 and second.n_bytes == 12_000_000
    assert start(second) + 10_000_000 <= start(third)
    assert third.n_bytes == len(LARGE) - start(third)


def start(request: Request) -> int:
    """The first byte asked for."""
    assert request.range is not None
    return int(request.range.removeprefix("bytes=").removesuffix("-"))


@pytest.mark.slow
@pytest.mark.parametrize("on_xet", [False, True])
def test_after_an_interrupt_the_rest_is_fetched(hub: Hub, client: Client, on_xet: bool) -> None:
    hub.add(DRAFTER, drafter_files() | {"model.safetensors": LARGE}, on_xet=on_xet)
    hub.stalls = threading.Event()
    run = client.start(DRAFTER)
    assert hub.stalls.wait(60)
    half = len(LARGE) // 2
    part = wait_for_part(client.home)
    run.process.send_signal(signal.SIGINT)
    assert client.finish(run) == {"interrupted": True}
    kept = part.stat().st_size
    assert 10_000_000 <= kept <= half
    hub.stalls = None
    source = client.fetch(DRAFTER)
    assert (source.folder / "model.safetensors").read_bytes() == LARGE
    assert hub.served("storage") == [half, len(LARGE) - kept]
    assert not list(client.home.rglob("*.incomplete"))


@pytest.mark.slow
def test_after_a_network_that_stayed_away_the_rest_is_fetched(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, drafter_files() | {"model.safetensors": LARGE})
    hub.breaks = [25_000_000] + [0] * 20
    message = client.refusal(DRAFTER)
    assert message.startswith(f"{DRAFTER}: the transfer failed (")
    assert message.endswith("run it again to resume it")
    hub.breaks = []
    source = client.fetch(DRAFTER)
    assert (source.folder / "model.safetensors").read_bytes() == LARGE
    assert hub.served("storage")[-1] <= len(LARGE) - 20_000_000


def test_a_cache_that_cannot_be_written_is_said(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, drafter_files())
    (client.home / "file").write_bytes(b"")
    client.environment["HF_HUB_CACHE"] = str(client.home / "file" / "hub")
    message = client.refusal(DRAFTER)
    assert f"Not a directory in the cache {client.home}/file/hub" in message
    assert "set HF_HOME elsewhere" in message


def wait_for_part(home: Path) -> Path:
    """The file that the transfer fills, once something is in it."""
    pause = threading.Event()
    for _ in range(600):
        for path in home.rglob("*.incomplete"):
            if path.stat().st_size:
                return path
        pause.wait(0.1)
    raise AssertionError("nothing arrived")


@pytest.mark.slow
def test_a_server_that_knows_no_ranges_does_no_harm(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, drafter_files() | {"model.safetensors": LARGE})
    hub.breaks, hub.ignores_ranges = [25_000_000], True
    source = client.fetch(DRAFTER)
    assert (source.folder / "model.safetensors").read_bytes() == LARGE
    assert hub.served("storage") == [25_000_000, len(LARGE)]


def test_damaged_weights_are_not_kept(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, drafter_files())
    hub.corrupts = True
    message = client.refusal(DRAFTER)
    assert message.startswith(f"{DRAFTER}: model.safetensors arrived damaged")
    hub.corrupts = False
    source = client.fetch(DRAFTER)
    assert (source.folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_a_repository_that_moved_is_found(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, drafter_files())
    hub.moved["old/Tiny-DFlash"] = DRAFTER
    source = client.fetch("old/Tiny-DFlash")
    assert (source.folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_the_token_of_the_usual_places_opens_gated_repositories(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, drafter_files(), gated=True)
    hub.tokens = {"member": True, "guest": False}
    terms = f"accept its terms at {hub.endpoint}/{DRAFTER}"
    assert client.refusal(DRAFTER) == (
        f"{DRAFTER}: gated: {terms}, then log in with `hf auth login` or set HF_TOKEN"
    )
    client.environment["HF_TOKEN"] = "guest"
    message = client.refusal(DRAFTER)
    assert message == f"{DRAFTER}: gated, and the token in use has no access: {terms}"
    client.environment["HF_TOKEN"] = "unknown"
    assert "refused the token in use (401)" in client.refusal(DRAFTER)
    del client.environment["HF_TOKEN"]
    (client.home / "token").write_text("member")
    source = client.fetch(DRAFTER)
    assert (source.folder / "model.safetensors").read_bytes() == WEIGHTS
    # the token stays with the hub
    assert {request.token for request in hub.requests if request.server == "storage"} == {None}


@pytest.mark.slow
def test_what_is_not_there_is_said(hub: Hub, client: Client) -> None:
    hub.add("lab/private", drafter_files(), private=True)
    for name in ("lab/nothing", "lab/private"):
        message = client.refusal(name)
        assert message.startswith(f"{name}: no such repository at {hub.endpoint}/{name}")
        assert "private" in message and "hf auth login" in message
    hub.add("lab/empty", {"README.md": b""})
    assert "holds no config.json" in client.refusal("lab/empty")
    hub.add("lab/pickle", {"config.json": b"{}", "pytorch_model.bin": b""})
    message = client.refusal("lab/pickle")
    assert "holds no safetensors file; pytorch_model.bin is a pickle" in message


@pytest.mark.slow
def test_without_a_network_the_cache_serves(hub: Hub, client: Client) -> None:
    commit = hub.add(DRAFTER, sharded_files())
    message = client.refusal(TARGET)
    online = client.fetch(DRAFTER)
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        client.environment = environment
        count = len(hub.requests)
        for revision in (None, commit):
            assert client.fetch(DRAFTER, revision=revision) == online
        message = client.refusal(TARGET)
        assert message.endswith("and it is not cached")
        if "HF_ENDPOINT" in environment:
            assert "http://127.0.0.1:9 cannot be reached" in message
        else:
            assert "offline, as HF_HUB_OFFLINE asks" in message
        assert "v7" in client.refusal(DRAFTER, revision="v7")
        assert len(hub.requests) == count
    (online.folder / "model-00002-of-00002.safetensors").unlink()
    message = client.refusal(DRAFTER)
    assert "the cache is not complete" in message
    assert "1 of 2 safetensors files are missing: model-00002" in message


@pytest.mark.slow
def test_a_hub_in_trouble_is_said(hub: Hub, client: Client) -> None:
    hub.add(DRAFTER, drafter_files())
    hub.status = 503
    assert "503" in client.refusal(DRAFTER)
    hub.status = None
    online = client.fetch(DRAFTER)
    for hub.status in (503, 429):
        assert client.fetch(DRAFTER) == online
