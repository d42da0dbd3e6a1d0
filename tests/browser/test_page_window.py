"""The page in windows of any width, in the dark and by day, for those who want no motion."""

from itertools import pairwise

import pytest
from playwright.sync_api import Browser, expect

from server_process import ServerProcess
from visit import Visit, visiting

WIDE = "Look:\n\n```text\n" + "x" * 300 + "\n```\n\n|" + "|".join(["column"] * 20) + "|\n|"
WIDE += "|".join(["---"] * 20) + "|\n\n" + "y" * 300
COLORS = """() => {
    const style = (name) => getComputedStyle(document.querySelector(name));
    return [
        [style("body").color, style("body").backgroundColor],
        [style("body").color, style("#welcome .draft").backgroundColor],
        [style("#model").color, style("body").backgroundColor],
        [style("#key-note").color, style("aside").backgroundColor],
        [style("#send").color, style("#send").backgroundColor],
    ];
}"""


def luminance(color: str) -> float:
    """Of a color as browsers tell it. https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(", ")]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def inner_width(visit: Visit) -> float:
    return float(visit.evaluate("innerWidth"))


def assert_fits(visit: Visit) -> None:
    width, inner = visit.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner
    width, inner = visit.evaluate("[chat.scrollWidth, chat.clientWidth]")
    assert width <= inner
    # labels and figures may be cut off where nothing scrolls
    parts = "[...document.querySelectorAll('header *, #drafting dl *, aside label')]"
    edges = visit.evaluate(f"{parts}.map((part) => part.getBoundingClientRect().right)")
    assert max(edges) <= inner_width(visit)
    for name in ("#prompt", "#clear"):
        expect(visit.page.locator(name)).to_be_in_viewport(ratio=0.9)


@pytest.mark.parametrize(("width", "height"), [(320, 568), (360, 640), (768, 1024), (1600, 900)])
def test_nothing_is_wider_than_the_window(
    browser: Browser, server: ServerProcess, width: int, height: int
) -> None:
    size = {"width": width, "height": height}
    with visiting(browser, server.url, viewport=size) as visit:
        assert_fits(visit)
        expect(visit.page.locator("#prompts button").first).to_be_in_viewport()
        visit.force(WIDE)
        visit.ask()
        visit.wait()
        assert_fits(visit)
        for summary in visit.page.locator("aside summary").all():
            if not summary.evaluate("(element) => element.parentElement.open"):
                summary.click()
        assert_fits(visit)


def test_dark_and_light(browser: Browser, server: ServerProcess) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        with visiting(browser, server.url, color_scheme=scheme) as visit:
            pairs = visit.evaluate(COLORS)
            assert min(contrast(*pair) for pair in pairs) >= 4.5, pairs
            grounds.append(luminance(pairs[0][1]))
    light, dark = grounds
    assert light > 0.8 and dark < 0.05


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_can_be_read_on_every_tint(
    browser: Browser, server: ServerProcess, scheme: str
) -> None:
    with visiting(browser, server.url, color_scheme=scheme) as visit:
        pairs = visit.evaluate(
            """() => ["keyword", "string", "number", "title", "comment"].flatMap((name) =>
                ["quiet", "draft", "draft copied"].map((tint) => {
                    const outer = document.createElement("span"), inner = outer.cloneNode();
                    [outer.className, inner.className] = ["hljs-" + name, tint];
                    outer.append(inner);
                    document.body.append(outer);
                    const ground = tint === "quiet" ? document.body : inner;
                    const { color } = getComputedStyle(outer);
                    return [color, getComputedStyle(ground).backgroundColor];
                }))"""
        )
        assert len(set(map(tuple, pairs))) == 15
        assert min(contrast(*pair) for pair in pairs) >= 4.5, pairs


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_motion(browser: Browser, server: ServerProcess, motion: str) -> None:
    with visiting(browser, server.url, reduced_motion=motion) as visit:
        visit.begin()
        name = visit.evaluate(
            "getComputedStyle(document.querySelector('.answer .body'), '::after').animationName"
        )
        assert (name == "none") == (motion == "reduce")
        visit.stop()


def test_who_reads_back_is_left_there(visit: Visit) -> None:
    visit.begin()
    chat = visit.page.locator("#chat")
    visit.until("chat.scrollHeight > chat.clientHeight + 400")
    tops = [chat.evaluate("(chat) => chat.scrollTop") for _ in range(2)]
    assert all(a <= b for a, b in pairwise(tops)) and tops[-1] > 0  # it follows the text
    chat.evaluate("(chat) => { chat.scrollTop = 10; }")
    height = chat.evaluate("(chat) => chat.scrollHeight")
    visit.until(f"chat.scrollHeight > {height}")
    assert chat.evaluate("(chat) => chat.scrollTop") == 10
    visit.stop()
