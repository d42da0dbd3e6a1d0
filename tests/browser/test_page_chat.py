"""Talking to the model: it streams, stops, goes on and tries again, with the keyboard alone."""

import httpx
import pytest
from playwright.sync_api import Browser, expect

from server_process import ServerProcess, n_busy, until
from visit import CHAT, KEY, PROMPT, Visit, visiting


def test_a_newcomer_s_first_click(visit: Visit) -> None:
    buttons = visit.page.locator("#prompts button")
    expect(buttons).to_have_count(3)
    buttons.first.click()
    visit.wait()
    assert visit.page.locator(".answer .body").inner_text().strip()
    expect(visit.page.locator("#welcome")).to_be_hidden()
    expect(visit.page.locator(".question")).to_have_text(visit.chats[0]["messages"][0]["content"])


def test_an_answer_comes_piece_by_piece(visit: Visit) -> None:
    visit.begin()
    body = visit.page.locator(".answer .body")
    lengths = set()
    while len(lengths) < 4:
        lengths.add(len(body.text_content() or ""))
        assert visit.page.locator(".answer").get_attribute("aria-busy") == "true"
    visit.page.locator("#stop").click()
    visit.wait()


def test_a_text_that_repeats_itself_is_said_and_no_boast(visit: Visit) -> None:
    visit.change(grammar='root ::= ("x = 1 "){900}', max_tokens=120)
    visit.ask()
    visit.wait()
    status = visit.page.locator(".answer footer .quiet")
    expect(status).to_contain_text("the text repeats itself: a temperature of 0.8")
    expect(status).not_to_contain_text("per round")


def test_the_text_is_the_model_s(visit: Visit, client: httpx.Client) -> None:
    shown = visit.answer()
    (body,) = visit.chats
    told = client.post("/v1/chat/completions", json={**body, "stream": False, "draft_detail": None})
    text = told.json()["choices"][0]["message"]["content"]
    assert text.startswith("```python\n")
    code = text.removeprefix("```python\n").removesuffix("\n").removesuffix("```").rstrip()
    assert visit.page.locator(".answer pre").inner_text().rstrip() == code
    assert "python" in shown


@pytest.mark.parametrize("key", ["Escape", "Enter"])
def test_a_key_stops_and_frees_the_slot(visit: Visit, client: httpx.Client, key: str) -> None:
    visit.begin()
    assert n_busy(client)
    if key == "Enter":
        visit.page.locator("#stop").focus()
    visit.page.keyboard.press(key)
    visit.wait()
    expect(visit.page.locator(".answer footer")).to_contain_text("stopped")
    text = visit.page.locator(".answer .body").inner_text()
    until(lambda: n_busy(client) == 0)
    assert visit.page.locator(".answer .body").inner_text() == text
    expect(visit.page.locator("#prompt")).to_be_focused()
    expect(visit.page.locator("#send")).to_be_visible()


def test_regenerate_asks_the_same_again(visit: Visit) -> None:
    first = visit.answer()
    visit.again()
    expect(visit.page.locator(".answer")).to_have_count(1)
    assert visit.page.locator(".answer .body").inner_text() == first
    assert visit.chats[0] == visit.chats[1]


def test_a_conversation_goes_on_and_starts_again(visit: Visit) -> None:
    visit.answer()
    visit.answer("Now subtract.")
    assert [message["role"] for message in visit.chats[1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    assert visit.chats[1]["messages"][1]["content"].startswith("```python\ndef add(")
    expect(visit.page.get_by_role("button", name="Regenerate")).to_have_count(1)
    visit.page.locator("#clear").click()
    expect(visit.page.locator("#welcome")).to_be_visible()
    expect(visit.page.locator("#messages")).to_be_empty()
    visit.answer()
    assert len(visit.chats[2]["messages"]) == 1


def test_shift_enter_begins_a_line_and_nothing_sends_blanks(visit: Visit) -> None:
    field = visit.page.locator("#prompt")
    field.press("Enter")
    field.fill("  ")
    field.press("Enter")
    assert visit.chats == []
    field.fill("one")
    field.press("Shift+Enter")
    field.press_sequentially("two")
    field.press("Enter")
    visit.wait()
    assert visit.chats[0]["messages"][0]["content"] == "one\ntwo"
    expect(field).to_have_value("")


def test_all_of_it_by_keyboard(visit: Visit) -> None:
    visit.answer()
    visit.page.locator("#clear").focus()
    seen = []
    while visit.evaluate("document.activeElement !== document.body"):
        seen.append(
            visit.evaluate(
                """() => {
                    const found = document.activeElement, style = getComputedStyle(found);
                    const visible = style.outlineStyle !== "none" && style.outlineWidth !== "0px";
                    return [found.id || found.textContent.trim(), visible];
                }"""
            )
        )
        visit.page.keyboard.press("Tab")
    assert all(visible for _, visible in seen), seen
    names = [name for name, _ in seen]
    wanted = ["clear", "Copy", "Regenerate", "prompt", "send", "temperature", "key"]
    places = [names.index(name) for name in wanted]
    assert places == sorted(places), names


def test_screen_readers_get_the_answer(visit: Visit) -> None:
    visit.force("One.\n\nTwo.\n\nThree.")
    visit.ask()
    visit.wait()
    live = visit.page.locator("#live")
    expect(live).to_have_attribute("aria-live", "polite")
    expect(live).to_contain_text("Three.")


def test_code_and_answers_are_copied(browser: Browser, server: ServerProcess) -> None:
    allowed = ["clipboard-read", "clipboard-write"]
    with visiting(browser, server.url, permissions=allowed) as visit:
        visit.force("Look:\n\n```python\na = 1\n\nb = 2\n```\n\nSo.")
        visit.answer()
        read = "navigator.clipboard.readText()"
        visit.page.get_by_role("button", name="Copy the code").click()
        expect(visit.page.locator("#live")).to_have_text("Copied")
        assert visit.evaluate(read) == "a = 1\n\nb = 2"
        visit.page.get_by_role("button", name="Copy the answer").click()
        visit.until(f"{read}.then((text) => text.startsWith('Look'))")
        assert visit.evaluate(read) == "Look:\n\n```python\na = 1\n\nb = 2\n```\n\nSo."
        visit.page.get_by_role("button", name="Copy the base URL").click()
        visit.until(f"{read}.then((text) => text.endsWith('/v1'))")
        assert visit.evaluate(read) == f"{server.url}/v1"


def test_a_server_that_is_gone(visit: Visit) -> None:
    visit.page.route(CHAT, lambda route: route.abort())
    visit.ask()
    visit.wait()
    expect(visit.page.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(visit.page.locator("#banner")).to_contain_text("What you wrote is kept")
    expect(visit.page.locator(".question")).to_have_text(PROMPT)
    visit.page.unroute(CHAT)
    expect(visit.page.locator("#banner")).to_be_hidden()  # the server answers again
    visit.again()
    assert "def add(" in visit.page.locator(".answer").inner_text()


def test_what_the_server_refuses(visit: Visit) -> None:
    visit.change(n=99)
    visit.ask()
    visit.wait()
    expect(visit.page.get_by_role("alert")).to_contain_text("n: ")


def test_a_key_is_asked_for_and_kept_for_this_tab(browser: Browser, locked: ServerProcess) -> None:
    with visiting(browser, locked.url) as visit:
        visit.ask()
        visit.wait()
        expect(visit.page.get_by_role("alert")).to_contain_text("a key is needed")
        expect(visit.page.locator("#unlock")).to_contain_text("only those who have its key")
        here, field = visit.page.locator("#key-here"), visit.page.locator("#key")
        expect(here).to_be_focused()
        here.fill(KEY)
        here.press("Enter")
        expect(visit.page.locator("#unlock")).to_be_hidden()
        expect(visit.page.get_by_label("Most tokens")).to_have_attribute("placeholder", "256")
        expect(visit.page.locator("#model")).to_have_text("tiny-coder-q8_0")
        visit.again()
        assert "def add(" in visit.page.locator(".answer").inner_text()
        visit.page.reload()
        expect(visit.page.locator("#model")).to_have_text("tiny-coder-q8_0")
        expect(field).to_have_value(KEY)
        kept = visit.evaluate("Object.entries(localStorage).flat()")
        assert kept and all(KEY not in text for text in kept)
        assert all(KEY not in request.url for request in visit.requests)
