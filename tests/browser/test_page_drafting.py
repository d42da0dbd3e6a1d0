"""The page shows the drafting as the server told it."""

import re

from playwright.sync_api import expect

from visit import Visit

NOTHING = "\N{EN DASH}"
FUNCTION = "Implement `read_json` in Python: Read a JSON file and return its contents."


def drafted(visit: Visit) -> str:
    return "".join(visit.page.locator(".answer .body .draft").all_text_contents())


def test_accepted_drafts_are_tinted_and_nothing_else(visit: Visit) -> None:
    """The answer is one block of code; its fences are not shown."""
    visit.choose("always")
    pieces = [p for c in visit.chunks(FUNCTION)[1:] for p in c["draft_detail"]["pieces"]]
    marked = [(char, piece["from_draft"]) for piece in pieces for char in piece["text"]]
    text = "".join(char for char, _ in marked)
    begin, end = len("```python\n"), text.rindex("\n```")
    assert text[:begin] == "```python\n" and text[end:].strip() == "```"
    assert visit.page.locator(".answer pre").text_content() == text[begin:end]
    code = marked[begin:end]
    indents = {
        i for found in re.finditer(r"^[ \t]+", text[begin:end], re.M) for i in range(*found.span())
    }
    wanted = "".join(char for i, (char, drafted) in enumerate(code) if drafted and i not in indents)
    assert 0 < len(wanted) < end - begin
    assert drafted(visit) == wanted


def test_the_numbers_are_the_server_s(visit: Visit) -> None:
    visit.choose("always")
    found = visit.chunks()
    rounds = [n for chunk in found[1:] for n in chunk["draft_detail"]["rounds"]]
    timings = found[-1]["timings"]
    expect(visit.page.locator("#length")).to_have_text(f"{sum(rounds) / len(rounds):.1f}")
    copied = [n for chunk in found[1:] for n in chunk["draft_detail"]["copied"]]
    parts = [timings["draft_n_accepted"], sum(copied)]
    share, copies = (int(100 * part / sum(rounds) + 0.5) for part in parts)
    expect(visit.page.locator("#share")).to_have_text(f"{share}%")
    expect(visit.page.locator("#copied")).to_have_text(f": {copies}%")
    speed = int(timings["predicted_per_second"] + 0.5)
    expect(visit.page.locator("#speed")).to_have_text(f"{speed}")
    expect(visit.page.locator("#rounds .own")).to_have_count(min(len(rounds), 64))
    drafts = [n - 1 - m for n, m in zip(rounds, copied, strict=True)]
    assert bars(visit, ".draft:not(.copied)") == [n for n in drafts[-64:] if n]
    assert bars(visit, ".copied") == [n for n in copied[-64:] if n]
    expect(visit.page.locator("#reason")).to_contain_text("always")


def bars(visit: Visit, kind: str) -> list[int]:
    """The heights of the parts of bars that are of that kind."""
    found: list[int] = visit.page.locator(f"#rounds {kind}").evaluate_all(
        "(bars) => bars.map((bar) => Number(bar.getAttribute('height')))"
    )
    return found


def test_copies_have_one_colour_in_text_bars_and_legend(visit: Visit) -> None:
    """The prompt holds what the answer is made to say."""
    text = "def mean(values):\n    return sum(values) / len(values)\n" * 3
    visit.force(text)
    visit.choose("always")
    visit.answer(text)
    copied = visit.page.locator(".answer .body .copied").first
    expect(copied).to_be_visible()
    assert sum(bars(visit, ".copied")) > 0
    color = "(element, name) => getComputedStyle(element)[name]"
    shown = {
        copied.evaluate(color, "backgroundColor"),
        visit.page.locator("#rounds .copied").first.evaluate(color, "fill"),
        visit.page.locator(".legend .copied").evaluate(color, "backgroundColor"),
    }
    assert len(shown) == 1
    told = visit.page.locator("#copied").inner_text().removeprefix(": ")
    assert told != "0%"
    expect(visit.page.locator(".answer footer .quiet")).to_contain_text(f" · {told} copied")


def test_they_move_while_it_streams(visit: Visit) -> None:
    visit.choose("always")
    visit.begin()
    visit.until("document.querySelectorAll('#rounds .own').length > 5")
    expect(visit.page.locator("#length")).not_to_have_text(NOTHING)
    expect(visit.page.locator("#speed")).not_to_have_text(NOTHING)
    expect(visit.page.locator(".answer .draft").first).to_be_visible()
    assert visit.page.locator(".answer").get_attribute("aria-busy") == "true"
    visit.stop()


def test_without_drafts_nothing_is_tinted_and_the_text_is_the_same(visit: Visit) -> None:
    visit.choose("never")
    plain = visit.answer()
    assert drafted(visit) == ""
    expect(visit.page.locator("#share")).to_have_text("0%")
    visit.choose("always")
    visit.again()
    assert drafted(visit) != ""
    assert visit.page.locator(".answer .body").inner_text() == plain
    assert [body["draft_width"] for body in visit.chats] == [0, 8]


def test_the_server_s_width_holds_until_another_is_chosen(visit: Visit) -> None:
    """The server of these tests runs with --draft-width 8."""
    served = visit.page.get_by_label("8 tokens a round, as the server is set")
    expect(served).to_be_checked()
    rounds = [n for c in visit.chunks(FUNCTION)[1:] for n in c["draft_detail"]["rounds"]]
    assert "draft_width" not in visit.chats[0]
    assert max(rounds) > 1
    visit.choose("auto")
    visit.answer()
    assert visit.chats[1]["draft_width"] == "auto"


def test_the_controller_is_quoted(visit: Visit) -> None:
    """Any decision on this machine; if it drafts no more, the page offers to."""
    visit.choose("auto")
    told = visit.chunks()[-1]["draft_detail"]["drafting"]
    assert told.startswith("drafting ")
    said = "drafting is on" if told.startswith("drafting is on") else told.partition(" is ")[2]
    expect(visit.page.locator("#reason")).to_contain_text(said)
    anyway = visit.page.locator("#anyway")
    if told.startswith("drafting is off"):
        anyway.click()
        visit.wait()
        assert drafted(visit) != ""
    expect(anyway).to_be_hidden()
