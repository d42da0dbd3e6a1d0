"""Pictures at the page: chosen, pasted and taken away again, shown to the model, and kept."""

import base64
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, FilePayload, expect

import tiny_coder
from server_process import EXACT, ServerProcess, serving
from vision_models import picture, write_projector, write_vision_target
from visit import Visit, visiting

SHOWN: FilePayload = {"name": "a.png", "mimeType": "image/png", "buffer": picture(96, 64)}
BROKEN: FilePayload = {"name": "b.png", "mimeType": "image/png", "buffer": b"no picture"}
PASTE = """(data) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "c.png", { type: "image/png" }));
  const event = new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true });
  document.getElementById("prompt").dispatchEvent(event);
}"""

DROP_TEXT = """() => {
  const transfer = new DataTransfer();
  transfer.setData("text/plain", "a text");
  const given = { dataTransfer: transfer, bubbles: true, cancelable: true };
  return document.getElementById("prompt").dispatchEvent(new DragEvent("drop", given));
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("vision")
    target = write_vision_target(folder / "seeing.gguf", "qwen3vl")
    projector = write_projector(folder / "mmproj-seeing.gguf", target)
    files = ("-m", str(target), "--draft", str(tiny_coder.pair()[1]), "--mmproj", str(projector))
    with serving(*files, *EXACT, "--ctx", "2048") as running:
        yield running


@pytest.fixture
def open_page(browser: Browser, seeing: ServerProcess) -> Iterator[Visit]:
    with visiting(browser, seeing.url) as visit:
        expect(visit.page.locator("#attach")).to_be_visible()
        yield visit


def test_a_picture_goes_with_a_question_and_stays_with_it(open_page: Visit) -> None:
    visit, page = open_page, open_page.page
    visit.change(max_tokens=8)
    page.locator("#files").set_input_files([SHOWN, BROKEN])
    expect(page.locator("#attached img")).to_have_count(1)
    expect(page.locator("#reason")).to_contain_text("b.png is no picture")
    page.evaluate(PASTE, base64.b64encode(picture(40, 40, seed=2)).decode())
    expect(page.locator("#attached img")).to_have_count(2)
    page.get_by_label("Remove picture 2").click()
    expect(page.locator("#attached img")).to_have_count(1)
    visit.ask()
    visit.wait()
    (body,) = visit.chats
    image, text = body["messages"][-1]["content"]
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert text["type"] == "text"
    expect(page.locator("#attached")).to_be_hidden()
    expect(page.locator(".question img")).to_have_count(1)
    page.reload()
    expect(page.locator(".question img")).to_have_count(1)
    assert page.locator(".question img").evaluate("(shown) => shown.naturalWidth") == 96
    visit.ask()
    visit.wait()
    assert len(visit.chats[-1]["messages"][0]["content"]) == 2


def test_pictures_that_come_at_once_all_stay(open_page: Visit) -> None:
    pasted = base64.b64encode(picture(40, 40)).decode()
    open_page.evaluate(f"(data) => {{ ({PASTE})(data); ({PASTE})(data); }}", pasted)
    expect(open_page.page.locator("#attached img")).to_have_count(2)


def test_a_text_that_is_dropped_goes_to_its_field(open_page: Visit) -> None:
    assert open_page.evaluate(DROP_TEXT)


def test_a_model_without_eyes_is_offered_none(visit: Visit) -> None:
    expect(visit.page.locator("#attach")).to_be_hidden()
    visit.page.evaluate(PASTE, base64.b64encode(picture()).decode())
    expect(visit.page.locator("#attached")).to_be_hidden()
