"""The browser keeps chats, until they are deleted, and settings. Questions are changed."""

import json
from pathlib import Path

from playwright.sync_api import Browser, expect

from server_process import ServerProcess
from visit import PROMPT, Visit, visiting

KEPT = "Object.keys(localStorage).filter((key) => key.startsWith('dflash-local-chat-')).length"


def reopen(visit: Visit, title: str = PROMPT) -> None:
    """Come back later, and open the chat of that title."""
    visit.open()
    visit.page.get_by_role("button", name="Chats").click()
    visit.page.get_by_role("button", name=title, exact=True).click()


def test_a_chat_is_there_again_and_goes_on(visit: Visit) -> None:
    visit.choose("always")
    visit.answer()
    shown = visit.page.locator(".answer .body").inner_html()
    told = visit.page.locator(".answer footer .quiet").inner_text()
    assert "draft" in shown
    reopen(visit)
    expect(visit.page.locator("#chats")).to_be_hidden()
    expect(visit.page.locator(".question")).to_have_text(PROMPT)
    assert visit.page.locator(".answer .body").inner_html() == shown
    assert visit.page.locator(".answer footer .quiet").inner_text() == told
    visit.answer("Now subtract.")
    roles = [message["role"] for message in visit.chats[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert all(set(message) == {"role", "content"} for message in visit.chats[-1]["messages"])
    assert visit.evaluate(KEPT) == 1
    visit.again()
    assert visit.chats[-1] == visit.chats[-2]


def test_who_deletes_a_chat_is_asked(visit: Visit) -> None:
    visit.answer()
    visit.page.locator("#clear").click()
    visit.answer("Another question")
    visit.page.get_by_role("button", name="Chats").click()
    expect(visit.page.locator("#kept .open")).to_have_text(["Another question", PROMPT])
    delete = visit.page.get_by_role("button", name="Delete the chat: Another question")
    asked = []
    visit.page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    delete.click()
    assert "Another question" in asked[0]
    assert visit.evaluate(KEPT) == 2
    visit.page.once("dialog", lambda dialog: dialog.accept())
    delete.click()
    expect(visit.page.locator("#kept .open")).to_have_text([PROMPT])
    expect(visit.page.locator("#messages")).to_be_empty()  # it was the open one
    assert visit.evaluate(KEPT) == 1


def test_an_answer_to_a_deleted_chat_does_not_bring_it_back(visit: Visit) -> None:
    visit.begin()
    visit.page.get_by_role("button", name="Chats").click()
    visit.page.once("dialog", lambda dialog: dialog.accept())
    visit.page.get_by_role("button", name=f"Delete the chat: {PROMPT}").click()
    expect(visit.page.locator("#send")).to_be_visible()
    assert visit.evaluate(KEPT) == 0


def test_a_full_browser_says_so_and_deletes_no_chat(visit: Visit) -> None:
    visit.evaluate(
        """() => {
            for (let i = 0; ; i++) {
                const chat = {
                    id: `chat-${i}`,
                    time: i,
                    messages: [{ role: "user", content: "x".repeat(2e5) }],
                };
                try {
                    localStorage.setItem("dflash-local-chat-" + i, JSON.stringify(chat));
                } catch {
                    break;
                }
            }
            while (true) {
                const rest = localStorage.getItem("rest") ?? "";
                try {
                    localStorage.setItem("rest", rest + "x".repeat(100));
                } catch {
                    break;
                }
            }
        }"""
    )
    before = visit.evaluate(KEPT)
    visit.answer()
    assert visit.evaluate(KEPT) == before
    assert visit.evaluate("localStorage.getItem('dflash-local-chat-0')") is not None
    banner = visit.page.locator("#banner")
    expect(banner).to_contain_text("no room left")
    with visit.page.expect_download() as saved:
        banner.get_by_role("button", name="Export all").click()
    chats = json.loads(Path(saved.value.path()).read_text())["chats"]
    assert len(chats) == before
    # Once there is room, it is kept, and the page says no more.
    visit.evaluate("['dflash-local-chat-0', 'rest'].forEach((key) => localStorage.removeItem(key))")
    visit.answer("Another one.")
    expect(banner).to_be_hidden()
    assert visit.evaluate(KEPT) == before


def test_chats_are_searched_renamed_and_taken_from_a_file(visit: Visit, tmp_path: Path) -> None:
    visit.answer()
    visit.page.locator("#clear").click()
    visit.answer("Another question")
    visit.page.get_by_role("button", name="Chats").click()
    visit.page.once("dialog", lambda dialog: dialog.accept("My sums"))
    visit.page.get_by_role("button", name=f"Rename the chat: {PROMPT}").click()
    expect(visit.page.locator("#kept .open")).to_have_text(["Another question", "My sums"])
    visit.page.get_by_label("Search the chats").fill("sum numbers")  # title and text together
    expect(visit.page.locator("#kept .open")).to_have_text(["My sums"])
    with visit.page.expect_download() as saved:
        visit.page.get_by_role("button", name="Export").click()
    visit.evaluate("localStorage.clear()")
    visit.page.locator("#import").set_input_files(saved.value.path())
    visit.page.get_by_label("Search the chats").fill("")
    expect(visit.page.locator("#kept .open")).to_have_text(["Another question", "My sums"])
    bad = tmp_path / "bad.json"
    bad.write_text("[1]")
    visit.page.locator("#import").set_input_files(bad)
    expect(visit.page.locator("#reason")).to_have_text("this file has no chats of this page")


def test_a_reload_returns_to_the_chat_and_its_part_written_answer(visit: Visit) -> None:
    visit.begin()
    visit.until("document.querySelector('.answer .body')?.textContent.length > 100")
    begun = visit.page.locator(".answer .body").inner_text()[:60]
    visit.page.reload()
    expect(visit.page.locator(".question")).to_have_text(PROMPT)
    expect(visit.page.locator(".answer .body")).to_contain_text(begun.strip().split("\n")[0])
    expect(visit.page.locator(".answer footer")).to_contain_text("broken off")
    visit.page.locator("#clear").click()
    visit.page.reload()
    expect(visit.page.locator("#welcome")).to_be_visible()


def test_what_was_before_is_stepped_through(visit: Visit) -> None:
    page = visit.page
    visit.answer("First")
    first = page.locator(".answer .body").inner_text()
    visit.change(grammar='root ::= "Something else."', max_tokens=20)
    visit.again()
    expect(page.locator(".answer .variants")).to_contain_text("2 of 2")
    expect(page.locator(".answer .body")).to_have_text("Something else.")
    page.get_by_role("button", name="The version before").click()
    assert page.locator(".answer .body").inner_text() == first
    visit.answer("Second")
    page.get_by_role("button", name="Edit the message").first.click()
    page.get_by_label("The message", exact=True).fill("Changed")
    page.locator(".editor").get_by_role("button", name="Send").click()
    visit.wait()
    expect(page.locator(".question")).to_have_text(["Changed"])
    page.reload()
    page.locator(".turn .variants").get_by_role("button", name="The version before").click()
    expect(page.locator(".question")).to_have_text(["First", "Second"])
    expect(page.locator(".answer .variants")).to_contain_text("1 of 2")
    assert page.locator(".answer .body").first.inner_text() == first


def test_what_is_no_chat_is_left_out(visit: Visit) -> None:
    visit.evaluate("localStorage.setItem('dflash-local-chat-a', '{')")
    visit.evaluate("localStorage.setItem('dflash-local-chat-b', 'null')")
    visit.evaluate("localStorage.setItem('dflash-local-settings', '[')")
    visit.open()
    visit.page.get_by_role("button", name="Chats").click()
    expect(visit.page.locator("#kept")).to_contain_text("None yet")


def test_a_question_is_changed_and_asked_again(visit: Visit) -> None:
    visit.answer("First")
    visit.answer("Second")
    edit = visit.page.get_by_role("button", name="Edit the message").first
    edit.click()
    field = visit.page.get_by_label("The message", exact=True)
    expect(field).to_be_focused()
    expect(field).to_have_value("First")
    field.press("Escape")
    expect(visit.page.locator(".question")).to_have_text(["First", "Second"])
    edit.click()
    field.fill("Changed")
    visit.page.locator(".editor").get_by_role("button", name="Send").click()
    visit.wait()
    expect(visit.page.locator(".question")).to_have_text(["Changed"])
    expect(visit.page.locator(".answer")).to_have_count(1)
    assert visit.chats[-1]["messages"] == [{"role": "user", "content": "Changed"}]
    reopen(visit, "Changed")
    expect(visit.page.locator(".question")).to_have_text(["Changed"])


def test_settings_are_sent_and_kept(visit: Visit) -> None:
    page = visit.page
    page.get_by_text("More sampling").click()
    expect(page.get_by_label("Most tokens")).to_have_attribute("placeholder", "256")
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0")
    values = {"Temperature": "9", "Top p": "0.5", "Top k": "7.4", "Min p": "0.1", "Seed": "3"}
    for name, value in {**values, "Repeat penalty": "1.1", "Most tokens": "5"}.items():
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_label("System prompt").fill("Be brief.")
    visit.answer()
    body = visit.chats[0]
    wanted = {"temperature": 2, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 3}
    wanted |= {"repeat_penalty": 1.1, "max_tokens": 5}
    assert {name: body[name] for name in wanted} == wanted
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    visit.open()
    expect(page.get_by_label("Top k", exact=True)).to_have_value("7.4")
    expect(page.get_by_label("Top k", exact=True)).to_be_visible()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    for name in ("Top p", "Top k", "Min p", "Seed", "Repeat penalty", "Temperature"):
        page.get_by_label(name, exact=True).fill("")
    page.get_by_label("System prompt").fill("")
    visit.answer()
    body = visit.chats[-1]
    assert not {"top_p", "top_k", "min_p", "seed", "repeat_penalty"} & set(body)
    assert "temperature" not in body  # the server knows the tiny model's own
    assert [message["role"] for message in body["messages"]] == ["user"]


def test_without_storage_it_works_all_the_same(browser: Browser, server: ServerProcess) -> None:
    with visiting(browser, server.url) as visit:
        visit.page.add_init_script(
            "Object.defineProperty(window, 'localStorage', { get() { throw new Error('no'); } })"
        )
        visit.open()
        assert visit.answer()
        visit.page.get_by_role("button", name="Chats").click()
        expect(visit.page.locator("#kept")).to_contain_text("None yet")


def test_the_docs_name_this_server(visit: Visit) -> None:
    visit.page.get_by_role("link", name="All that can be called").click()
    expect(visit.page.locator("main code").first).to_have_text(f"{visit.origin}/v1")
    assert "127.0.0.1:8080" not in visit.page.locator("main").inner_text()
    visit.page.get_by_role("link", name="Chat").click()
    expect(visit.page.locator("#welcome")).to_be_visible()


def test_a_chat_too_large_for_the_browser_costs_no_other(visit: Visit) -> None:
    visit.answer()
    kept = visit.evaluate(
        """async () => {
            const { keep } = await import("/page/chats.js");
            const content = "x".repeat(2e7);
            return keep({ id: "chat-large", messages: [{ role: "user", content }] });
        }"""
    )
    assert kept is False
    assert visit.evaluate(KEPT) == 1
