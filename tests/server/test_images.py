"""Pictures in the forms of all APIs, as a server with a projector answers them."""

import base64
import io
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

import tiny_coder
from damage import damaged_bytes
from dflash_local.target_model.pixels import FORMATS
from lab.server.resources import resources
from server_process import EXACT, ServerProcess, serving
from vision_models import asked, data_uri, picture, write_projector, write_vision_target

LIMIT = 12
SHOWN = picture(256, 256, seed=1)
IN_BASE64 = base64.b64encode(SHOWN).decode()
QUESTION = "def add(a, b):"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("vision")
    target = write_vision_target(folder / "seeing.gguf", "qwen3vl")
    write_projector(folder / "mmproj-seeing.gguf", target)  # it is found there
    files = ("-m", str(target), "--draft", str(tiny_coder.pair()[1]))
    with serving(*files, *EXACT, "--ctx", "2048", "--cache-mb", "64") as server:
        yield server


@pytest.fixture(scope="module")
def seeing(process: ServerProcess) -> Iterator[httpx.Client]:
    with process.client() as client:
        yield client


def _posted(client: httpx.Client, *pictures: bytes) -> httpx.Response:
    body = {"messages": [asked(QUESTION, *pictures)], "max_tokens": LIMIT, "temperature": 0}
    return client.post("/v1/chat/completions", json=body)


def _at(client: httpx.Client, url: str) -> str:
    """The line with which a picture at that address is refused."""
    message = asked(QUESTION, b"")
    message["content"][0]["image_url"]["url"] = url
    answer = client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 4})
    assert answer.status_code == 400, answer.text
    told: str = answer.json()["error"]["message"]
    return told


def _saved(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def _openai(client: httpx.Client, *pictures: bytes) -> dict[str, Any]:
    answer = _posted(client, *pictures)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_all_apis_show_the_model_the_same_picture(seeing: httpx.Client) -> None:
    expected = _openai(seeing, SHOWN)["choices"][0]["message"]["content"]
    greedy = {"temperature": 0}
    part = {"type": "input_image", "image_url": data_uri(SHOWN)}
    text = {"type": "input_text", "text": QUESTION}
    body: dict[str, Any] = {"input": [{"role": "user", "content": [part, text]}], **greedy}
    answer = seeing.post("/v1/responses", json={**body, "max_output_tokens": LIMIT}).json()
    assert answer["output"][-1]["content"][0]["text"] == expected
    source = {"type": "base64", "media_type": "image/png", "data": IN_BASE64}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": LIMIT, **greedy}
    answer = seeing.post("/v1/messages", json=body).json()
    assert answer["content"][-1]["text"] == expected
    asks: dict[str, Any] = {"options": {"num_predict": LIMIT, **greedy}, "stream": False}
    in_lines = base64.encodebytes(SHOWN).decode()
    message = {"role": "user", "content": QUESTION, "images": [in_lines]}
    answer = seeing.post("/api/chat", json={"messages": [message], **asks}).json()
    assert answer["message"]["content"] == expected
    body = {"prompt": QUESTION, "images": [IN_BASE64], **asks}
    answer = seeing.post("/api/generate", json=body).json()
    assert answer["response"] == expected
    assert "context" not in answer


def test_a_raw_prompt_has_a_marker_for_each_picture(seeing: httpx.Client) -> None:
    def posted(n_marks: int, *files: str) -> httpx.Response:
        prompt = {"prompt_string": "<__media__>" * n_marks + QUESTION, "multimodal_data": files}
        body = {"prompt": prompt, "n_predict": LIMIT, "temperature": 0}
        return seeing.post("/completion", json=body)

    small = base64.b64encode(picture(64, 64, seed=9)).decode()
    n_large, n_small = (posted(1, data).json()["tokens_evaluated"] for data in (IN_BASE64, small))
    assert n_large > n_small > 16
    for refused in (posted(0, small), posted(2, small), posted(1, "%")):
        assert refused.status_code == 400, refused.text


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1/x.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("/etc/passwd", "nothing is fetched"),
        ("data:image/png;base64,####", "base64"),
        ("data:image/png,abc", "base64"),
        (data_uri(b"no picture"), "none that can be read"),
        (data_uri(picture()[:70]), "cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_line(
    seeing: httpx.Client, url: str, said: str
) -> None:
    told = _at(seeing, url)
    assert said in told and "\n" not in told


def test_a_path_of_the_server_is_no_picture(seeing: httpx.Client) -> None:
    for part in ({"type": "image", "image": "/etc/passwd"}, {"type": "image", "path": "/x"}):
        message = {"role": "user", "content": [part, {"type": "text", "text": "a"}]}
        answer = seeing.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 4})
        assert answer.status_code == 400, answer.text


def test_a_picture_without_a_place_in_the_prompt_is_refused(seeing: httpx.Client) -> None:
    media = {"prompt_string": "<__media__>a", "multimodal_data": [IN_BASE64]}
    for path, body in (
        ("/completion", {"prompt": [1, media], "n_predict": 1}),
        ("/api/generate", {"prompt": "a", "images": [IN_BASE64], "raw": True}),
        ("/api/generate", {"prompt": "a", "images": [IN_BASE64], "suffix": "b"}),
    ):
        answer = seeing.post(path, json=body)
        assert answer.status_code == 400, answer.text


def test_a_large_picture_has_room_where_the_projector_was_found(seeing: httpx.Client) -> None:
    _openai(seeing, SHOWN + bytes(7 << 20))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory in /proc")
def test_pictures_of_attackers_cost_the_server_nothing(
    process: ServerProcess, seeing: httpx.Client
) -> None:
    """Damaged ones, large ones in small files, and files of 20 MiB that are none."""
    large = Image.new("RGBA", (4000, 3000))
    bombs = [_saved(large, kind) for kind in ("PNG", "WEBP")]
    bombs += [_saved(large.convert("L"), kind) for kind in ("GIF", "BMP", "JPEG")]
    bombs += [bytes(20 << 20)] * 6
    good = [picture(48, 40, seed=i, kind=kind) for i, kind in enumerate(FORMATS)]
    pid = process.process.pid
    expected = _openai(seeing, SHOWN)["choices"]
    before = resources(pid)
    for i in range(300):
        rng, data = random.Random(i), good[i % len(good)]
        answer = _posted(seeing, damaged_bytes(data, rng, rng.choice([100, len(data)])))
        assert answer.status_code in (200, 400), answer.text
    for data in bombs:
        answer = _posted(seeing, data)
        assert answer.status_code == 400, answer.text
        after = resources(pid)
        assert before and after and after.memory_mib - before.memory_mib < 300
    assert _openai(seeing, SHOWN)["choices"] == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory in /proc")
def test_sixteen_large_pictures_at_once(process: ServerProcess, seeing: httpx.Client) -> None:
    folder = Path(f"/proc/{process.process.pid}")

    def mib(key: str) -> float:
        return int(folder.joinpath("status").read_text().split(f"{key}:")[1].split()[0]) / 1024

    def post(i: int) -> int:
        return _posted(seeing, SHOWN + bytes(7 << 20) + bytes([i])).status_code

    assert post(0) == 200
    folder.joinpath("clear_refs").write_text("5")  # the peak begins anew
    before = mib("VmRSS")
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(post, range(16))) == {200}
    assert mib("VmHWM") - before < 300


def test_clients_see_that_it_takes_pictures(seeing: httpx.Client) -> None:
    assert seeing.get("/props").json()["modalities"]["vision"] is True
    assert "vision" in seeing.post("/api/show", json={"model": "seeing"}).json()["capabilities"]


@pytest.mark.slow
def test_a_server_that_may_fetch_asks_no_machine_around(tmp_path: Path) -> None:
    target = write_vision_target(tmp_path / "seeing.gguf", "qwen3vl")
    write_projector(tmp_path / "mmproj-seeing.gguf", target)
    files = ("-m", str(target), "--draft", "none", "--allow-remote-images")
    urls = "http://127.0.0.1:1/x.png", "https://localhost/x.png", "http://10.0.0.1/x.png"
    with serving(*files, *EXACT) as server, server.client() as client:
        for url in urls:
            assert "it is on no public machine" in _at(client, url)
