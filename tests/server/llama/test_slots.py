"""Slots that are asked for by number, saved under a name, restored and erased."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from long_text import PYTHON_SOURCE
from server_process import EXACT, serving

PROMPT = PYTHON_SOURCE[:600]
OTHER = "def add(a, b):\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots") / "saved"


@contextmanager
def opened(folder: Path, *options: str) -> Iterator[httpx.Client]:
    folder.mkdir(exist_ok=True)
    usual = ("--slot-save-path", str(folder), "--parallel", "2", "--cache-mb", "0", *EXACT)
    with serving(*usual, *options) as server, server.client() as client:
        yield client


@pytest.fixture(scope="module")
def client(folder: Path, cache_folder: Path) -> Iterator[httpx.Client]:
    with opened(folder) as client:
        yield client


def completed(client: httpx.Client, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 12, "temperature": 0, **fields}
    answer: dict[str, Any] = client.post("/completion", json=body).raise_for_status().json()
    return answer


def change(client: httpx.Client, slot: int, action: str, name: str | None = None) -> httpx.Response:
    body = None if name is None else {"filename": name}
    return client.post(f"/slots/{slot}", params={"action": action}, json=body)


def cached(client: httpx.Client) -> list[int]:
    return [slot["n_cached_tokens"] for slot in client.get("/slots").json()]


def test_a_slot_comes_back_in_another_one(client: httpx.Client, folder: Path) -> None:
    for slot in (0, 1):
        change(client, slot, "erase").raise_for_status()
    first = completed(client, id_slot=1)
    n = first["timings"]["prompt_n"]
    assert cached(client)[0] == 0 and cached(client)[1] > n
    told = change(client, 1, "save", "a talk.bin").raise_for_status().json()
    assert told["id_slot"] == 1 and told["filename"] == "a talk.bin"
    assert told["n_saved"] == cached(client)[1]
    assert told["n_written"] == (folder / "a talk.bin").stat().st_size
    assert told["timings"]["save_ms"] > 0
    erased = change(client, 1, "erase").raise_for_status().json()
    assert erased == {"id_slot": 1, "n_erased": told["n_saved"]}
    assert cached(client) == [0, 0]
    again = change(client, 0, "restore", "a talk.bin").raise_for_status().json()
    assert (again["n_restored"], again["n_read"]) == (told["n_saved"], told["n_written"])
    second = completed(client, id_slot=0)
    assert second["timings"]["prompt_n"] == 1
    assert second["content"] == first["content"]
    change(client, 0, "erase").raise_for_status()
    third = completed(client, id_slot=0)
    assert third["timings"]["prompt_n"] == n and third["content"] == first["content"]


@pytest.mark.slow
def test_a_slot_outlives_its_server(folder: Path, client: httpx.Client) -> None:
    first = completed(client, id_slot=0)
    change(client, 0, "save", "kept").raise_for_status()
    with opened(folder) as other:
        change(other, 1, "restore", "kept").raise_for_status()
        second = completed(other, id_slot=1)
        assert second["timings"]["prompt_n"] == 1
        assert second["content"] == first["content"]


def test_the_slot_is_the_one_that_was_asked_for(client: httpx.Client) -> None:
    for slot in (1, 0, 1):
        for each in (0, 1):
            change(client, each, "erase").raise_for_status()
        completed(client, OTHER, id_slot=slot)
        assert [n > 0 for n in cached(client)] == [slot == 0, slot == 1]
    assert completed(client, OTHER, id_slot=7)["content"]  # there is none: any is taken
    assert completed(client, OTHER, id_slot=-1)["content"]


@pytest.mark.parametrize(
    "name",
    [
        *("../talk", "/tmp/talk", "a/b", "a\\b", ".", "..", ".hidden", "c:talk", "talk\0"),
        *("talk.", " a", "CON", "nul.bin", "Com1", "lpt9 .a.b"),
    ],
)
def test_no_name_leads_out_of_the_folder(client: httpx.Client, folder: Path, name: str) -> None:
    completed(client, id_slot=0)
    before = sorted(folder.parent.rglob("*"))
    for action in ("save", "restore"):
        answer = change(client, 0, action, name)
        assert answer.status_code == 400
        assert "no name of a saved slot" in answer.json()["error"]["message"]
    assert sorted(folder.parent.rglob("*")) == before


def test_what_cannot_be_is_refused(client: httpx.Client, folder: Path) -> None:
    change(client, 1, "erase").raise_for_status()
    (folder / "damaged").write_bytes(b"no slot")
    (folder / "link").symlink_to(folder / "kept")
    for slot, action, name, message in (
        (1, "save", "empty", "nothing that can be saved"),
        (1, "restore", "missing", "cannot be restored: No such file"),
        (1, "restore", "damaged", "not a saved prefix"),
        (1, "restore", "link", "cannot be restored"),
        (2, "save", "talk", "no slot 2; there are 0 to 1"),
        (0, "save", None, "needs the name of a file"),
        (0, "forget", "talk", "action"),
    ):
        answer = change(client, slot, action, name)
        assert answer.status_code == 400
        assert re.search(message, answer.json()["error"]["message"]), answer.text


def test_keys_do_not_reach_each_others_slots_and_files(folder: Path, cache_folder: Path) -> None:
    def by(client: httpx.Client, key: str) -> httpx.Client:
        client.headers["Authorization"] = f"Bearer {key}"
        return client

    with opened(folder, "--api-key", "one", "--api-key", "two") as client:
        n = completed(by(client, "one"), id_slot=0)["timings"]["prompt_n"]
        saved = change(client, 0, "save", "mine").raise_for_status().json()
        for action in ("save", "restore"):
            refused = change(by(client, "two"), 0, action, "mine")
            assert refused.status_code == 400, action
        assert change(client, 0, "erase").raise_for_status().json()["n_erased"] == 0
        completed(client, OTHER, id_slot=1)
        change(client, 1, "save", "mine").raise_for_status()  # in place of nobody else's
        change(by(client, "one"), 0, "erase").raise_for_status()
        again = change(client, 0, "restore", "mine").raise_for_status().json()
        assert again["n_restored"] == saved["n_saved"] > n
        assert completed(client, id_slot=0)["timings"]["prompt_n"] == 1


@pytest.mark.slow
def test_exact_answers_of_several_slots() -> None:
    """Each has an equal part of the context; asked at once, the answers are those of one."""
    options = (*EXACT, "--exact", "--ctx", "1024", "--parallel", "2")
    with serving(*options) as server, server.client() as client:
        assert client.get("/props").json()["total_slots"] == 2
        assert {slot["n_ctx"] for slot in client.get("/slots").json()} == {512}

        def ask(seed: int) -> str:
            body = {"prompt": f"def f{seed}(", "n_predict": 24, "temperature": 0.8, "seed": seed}
            text: str = client.post("/completion", json=body).json()["content"]
            return text

        alone = list(map(ask, range(4)))
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ask, range(4))) == alone
