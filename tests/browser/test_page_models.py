"""The page of a server of several models: which one is talked to, and what it says of loading."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from embedding_models import write_bert
from server_process import ServerProcess, serving
from visit import Visit, visiting

BRIEF = {"max_tokens": 32, "temperature": 0}
LOADING = "this model is loaded with the first message to it"


@pytest.fixture(scope="module")
def several(
    server: ServerProcess, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Three models that write text, one of them broken, and one that does not. It waits for the
    other server, as all do."""
    target, drafter = pair
    folder = tmp_path_factory.mktemp("several")
    broken = folder / "broken.gguf"
    broken.write_bytes(b"GGUF")
    named = (f"tiny-coder={target},{drafter}", f"plain:q8={target}", f"broken={broken}")
    vectors = f"vectors={write_bert(folder / 'bert.gguf')}"
    arguments = [word for model in (*named, vectors) for word in ("--model", model)]
    with serving(*arguments, "--gpu-layers", "0", "--threads", "1") as running:
        yield running


@pytest.fixture
def visit(browser: Browser, several: ServerProcess) -> Iterator[Visit]:
    with visiting(browser, several.url) as visit:
        visit.change(**BRIEF)
        yield visit


def test_a_server_of_one_model_has_nothing_to_choose(
    browser: Browser, server: ServerProcess
) -> None:
    with visiting(browser, server.url) as visit:
        expect(visit.page.locator("#chooser")).to_be_hidden()
        expect(visit.page.locator("#model")).to_have_text("tiny-coder-q8_0")
        visit.answer()
        assert "model" not in visit.chats[0]


def test_looking_loads_nothing_and_asking_does(visit: Visit, several: ServerProcess) -> None:
    chooser = visit.page.get_by_label("Model", exact=True)
    expect(chooser).to_be_visible()
    expect(visit.page.locator("#model")).to_be_hidden()
    names = ["tiny-coder (not loaded)", "plain:q8 (not loaded)", "broken (not loaded)"]
    assert chooser.locator("option").all_inner_texts() == names
    expect(visit.page.locator("#reason")).to_have_text(LOADING)
    expect(visit.page.get_by_label("always")).to_be_disabled()
    # Its defaults are known, and hold for the first answer, too.
    expect(visit.page.get_by_label("Temperature")).to_have_attribute("placeholder", "0")
    expect(visit.page.get_by_label("Most tokens")).to_have_attribute("placeholder", "256")
    assert not any(line.startswith("loading") for line in several.log)
    assert visit.answer()
    assert visit.chats[0]["model"] == "tiny-coder"
    expect(chooser.locator("option").first).to_have_text("tiny-coder")
    expect(visit.page.get_by_label("always")).to_be_enabled()
    expect(visit.page.locator("#reason")).not_to_have_text(LOADING)


def test_another_model_is_chosen_by_the_keyboard(visit: Visit) -> None:
    chooser = visit.page.get_by_label("Model", exact=True)
    visit.page.locator("#prompt").focus()
    while not chooser.evaluate("(element) => element === document.activeElement"):
        visit.page.keyboard.press("Shift+Tab")
    visit.page.keyboard.press("ArrowDown")
    expect(chooser).to_have_value("plain:q8")
    expect(visit.page.locator("#name")).to_have_text("plain:q8")
    assert visit.answer()
    assert visit.chats[-1]["model"] == "plain:q8"
    expect(visit.page.locator("#reason")).to_have_text("this model is served without a drafter")
    # It is remembered as long as the tab is open.
    visit.open()
    expect(chooser).to_have_value("plain:q8")


def test_why_a_model_cannot_be_loaded_is_said(visit: Visit) -> None:
    visit.page.get_by_label("Model", exact=True).select_option("broken")
    visit.ask()
    visit.wait()
    expect(visit.page.get_by_role("alert")).to_contain_text("broken cannot be loaded: broken.gguf")
    visit.page.get_by_label("Model", exact=True).select_option("tiny-coder")
    visit.again()
    expect(visit.page.get_by_role("alert")).to_have_count(0)
    expect(visit.page.locator(".answer .body")).not_to_be_empty()


@pytest.mark.parametrize("width", [320, 768])
def test_the_chooser_fits_narrow_windows(
    browser: Browser, pair: tuple[Path, Path], server: ServerProcess, width: int
) -> None:
    long = "a-model-with-a-name-" + "that-goes-on-and-on-" * 4
    models = [word for name in (long, "b") for word in ("--model", f"{name}={pair[0]}")]
    size = {"width": width, "height": 568}
    with serving(*models) as running, visiting(browser, running.url, viewport=size) as visit:
        wide, inner = visit.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= inner
        for name in ("#chooser", "#clear", "#prompt"):
            expect(visit.page.locator(name)).to_be_in_viewport(ratio=0.9)


@pytest.fixture
def loading(
    browser: Browser, server: ServerProcess, pair: tuple[Path, Path], tmp_path: Path
) -> Iterator[Visit]:
    """The page of a server while it loads a model for an answer, which takes seconds: the costs of
    drafting are measured anew."""
    slow = {"DFLASH_LOCAL_CACHE": str(tmp_path), "DFLASH_LOCAL_CALIBRATION_S": "4"}
    models = ("--model", f"slow={pair[0]},{pair[1]}", "--model", f"quick={pair[0]}")
    with (
        serving(*models, "--gpu-layers", "0", environment=slow) as running,
        visiting(browser, running.url) as visit,
    ):
        visit.change(**BRIEF)
        visit.ask()
        expect(visit.page.locator(".answer footer")).to_contain_text("loading slow")
        yield visit


def test_how_far_a_model_is_loaded_is_shown(loading: Visit) -> None:
    loading.wait()
    expect(loading.page.locator(".answer .body")).not_to_be_empty()
    expect(loading.page.locator(".answer footer")).not_to_contain_text("loading")


def test_who_does_not_want_to_wait_for_a_model_stops(loading: Visit) -> None:
    loading.page.keyboard.press("Escape")
    expect(loading.page.locator(".answer footer")).to_contain_text("stopped")
    expect(loading.page.locator(".answer footer")).not_to_contain_text("loading")
