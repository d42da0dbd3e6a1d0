"""Models on the page: those of the list, fetched from the hub's stand-in, chosen and removed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect

import library_hub
from hub_stand_in import Hub
from library_hub import N_BYTES
from server_process import EXACT, ServerProcess, serving
from visit import Visit, visiting

BRIEF = {"max_tokens": 24, "temperature": 0}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with library_hub.running() as hub:
        yield hub


@pytest.fixture
def running(hub: Hub, tmp_path: Path, server: ServerProcess) -> Iterator[ServerProcess]:
    """The tiny pair, served to someone with an empty cache. It waits for the other server, as
    all do."""
    with serving(*EXACT, environment=library_hub.environment(hub, tmp_path)) as running:
        yield running


@pytest.fixture
def visit(browser: Browser, running: ServerProcess) -> Iterator[Visit]:
    with visiting(browser, running.url) as visit:
        visit.change(**BRIEF)
        visit.page.get_by_role("button", name="Models").click()
        yield visit


def row(visit: Visit, name: str) -> Locator:
    return visit.page.locator("#listed li").filter(has=visit.page.get_by_text(name, exact=True))


def test_a_model_is_fetched_used_and_removed(visit: Visit, tmp_path: Path) -> None:
    expect(visit.page.locator("#advice")).to_contain_text("Best for this machine: ")
    expect(row(visit, "aaa-tiny")).to_contain_text("30.4 MB")
    expect(row(visit, "aaa-huge")).to_contain_text("too large")
    visit.page.get_by_role("button", name="Fetch aaa-tiny").click()
    # It is fetched, chosen, and answers.
    expect(visit.page.locator("#library")).to_be_hidden()
    expect(visit.page.get_by_label("Model", exact=True)).to_have_value("aaa-tiny")
    assert visit.answer()
    assert visit.chats[-1]["model"] == "aaa-tiny"

    visit.page.get_by_role("button", name="Models").click()
    expect(row(visit, "aaa-tiny")).to_contain_text("here: Q8_0")
    asked: list[str] = []
    visit.page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    visit.page.get_by_role("button", name="Remove aaa-tiny").click()
    assert "Remove aaa-tiny and its drafter from this disk? " in asked[0]
    assert list(tmp_path.rglob("*.gguf"))
    visit.page.once("dialog", lambda dialog: dialog.accept())
    visit.page.get_by_role("button", name="Remove aaa-tiny").click()
    expect(visit.page.get_by_role("button", name="Fetch aaa-tiny")).to_be_visible()
    assert not list(tmp_path.rglob("*.gguf"))
    expect(visit.page.locator("#model")).to_have_text("tiny-coder-q8_0")


def test_a_transfer_shows_how_far_it_is_and_can_be_given_up(visit: Visit, hub: Hub) -> None:
    hub.stalls = threading.Event()
    visit.page.get_by_role("button", name="Fetch aaa-tiny").click()
    expect(visit.page.locator("#fetched")).to_contain_text(" of 30.4 MB")
    bar = visit.page.get_by_role("progressbar", name="Fetched")
    element = bar.element_handle()
    visit.page.wait_for_function("(bar) => 0 < bar.value && bar.value < 1", arg=element)
    hub.stalls = None
    visit.page.get_by_role("button", name="Cancel").click()
    expect(visit.page.locator("#fetched")).to_contain_text("what has come is kept")
    expect(bar).to_be_hidden()
    visit.page.get_by_role("button", name="Fetch aaa-tiny").click()
    expect(visit.page.get_by_label("Model", exact=True)).to_have_value("aaa-tiny")
    assert N_BYTES not in hub.served("storage")  # it went on where it was


def test_why_a_model_cannot_be_fetched_is_said(visit: Visit, hub: Hub) -> None:
    hub.status = 503
    visit.page.get_by_role("button", name="Fetch aaa-tiny").click()
    expect(visit.page.locator("#fetched")).to_contain_text("lab/Tiny-GGUF: the hub answered 503")
    hub.status = None
    visit.page.get_by_role("button", name="Fetch aaa-huge").click()
    expect(visit.page.locator("#fetched")).to_contain_text("lab/Huge-GGUF: no such repository")


def test_a_model_in_use_is_not_removed(visit: Visit, tmp_path: Path) -> None:
    visit.page.get_by_role("button", name="Fetch aaa-tiny").click()
    expect(visit.page.get_by_label("Model", exact=True)).to_have_value("aaa-tiny")
    visit.begin()
    visit.page.get_by_role("button", name="Models").click()
    visit.page.once("dialog", lambda dialog: dialog.accept())
    visit.page.get_by_role("button", name="Remove aaa-tiny").click()
    expect(visit.page.locator("#fetched")).to_contain_text("aaa-tiny is in use")
    assert list(tmp_path.rglob("*.gguf"))


def test_models_are_found_by_their_names(visit: Visit) -> None:
    visit.page.get_by_label("Search the models").fill("huge 9000")
    expect(visit.page.locator("#listed li strong")).to_have_text(["aaa-huge"])
    visit.page.get_by_label("Search the models").fill("nothing like it")
    expect(visit.page.locator("#listed li")).to_have_text(["No model has this name."])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1200])
def test_the_list_fits_the_window(
    browser: Browser, running: ServerProcess, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 568}
    with visiting(browser, running.url, viewport=size, color_scheme=scheme) as visit:
        visit.page.get_by_role("button", name="Models").click()
        expect(visit.page.get_by_role("button", name="Fetch aaa-tiny")).to_be_in_viewport(ratio=0.9)
        drawer = visit.page.locator("#library")
        wide, inner = drawer.evaluate("(element) => [element.scrollWidth, element.clientWidth]")
        assert wide <= inner
