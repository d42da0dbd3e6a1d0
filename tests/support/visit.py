"""One visit to the page: what its user does and sees, and checks that the page behaves."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, Request, Route, expect

CHAT = "**/v1/chat/completions"
KEY = "a-key-of-the-tests"
PROMPT = "Implement `add` in Python: Return the sum of two numbers."

_WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
window.bodies = [];
const send = window.fetch;
window.fetch = async (...request) => {
  const response = await send(...request);
  response.clone().text().then((body) => bodies.push(body), () => {});
  return response;
};
"""


class Visit:
    """An open page, with all the `requests` that it has sent and the `faults` in it."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.requests: list[Request] = []
        self.faults: list[str] = []
        page.on("request", lambda request: self.requests.append(request))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._on_console)
        page.add_init_script(_WATCH)

    def open(self) -> None:
        self.page.goto(self.origin)
        # Wait until the server has said which models it has, or has refused to.
        expect(self.page.locator("#name:not(:empty), #reason:not(:empty)")).not_to_have_count(0)

    def change(self, **more: Any) -> None:
        """Add these fields to every chat request on its way to the server; None removes one."""

        def pass_on(route: Route) -> None:
            body = {**json.loads(route.request.post_data or ""), **more}
            kept = {name: value for name, value in body.items() if value is not None}
            route.continue_(post_data=json.dumps(kept))

        self.page.route(CHAT, pass_on)

    def force(self, text: str) -> None:
        """Have the model answer `text`, token by token."""
        self.change(grammar=f"root ::= {json.dumps(text)}", max_tokens=1000)

    def ask(self, text: str = PROMPT) -> None:
        self.page.locator("#prompt").fill(text)
        self.page.locator("#prompt").press("Enter")

    def begin(self) -> None:
        """Ask for an answer that does not end; its first words are there."""
        self.change(ignore_eos=True, max_tokens=None)
        self.ask()
        expect(self.page.locator(".answer .body")).not_to_be_empty()

    def stop(self) -> None:
        self.page.keyboard.press("Escape")
        self.wait()

    def again(self) -> None:
        """Have the last question answered once more."""
        self.page.get_by_role("button", name="Regenerate").click()
        self.wait()

    def wait(self) -> None:
        """Until the answer is complete."""
        answer = self.page.locator(".answer").last
        expect(answer).to_have_attribute("aria-busy", "false", timeout=120_000)

    def answer(self, text: str = PROMPT) -> str:
        """Ask, and read the whole answer as it is shown."""
        self.ask(text)
        self.wait()
        return self.page.locator(".answer .body").last.inner_text()

    def choose(self, width: str) -> None:
        """Say when to draft: "auto", "always" or "never"."""
        self.page.locator(f"input[name=width][value={width}]").check()

    def evaluate(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def until(self, script: str) -> None:
        """Wait until `script` is true. Playwright's own way to wait needs `eval`, which the page's
        policy forbids."""
        until = time.monotonic() + 60
        while not self.evaluate(script):
            assert time.monotonic() < until, f"this never became true: {script}"
            self.page.wait_for_timeout(20)

    def chunks(self, text: str = PROMPT) -> list[dict[str, Any]]:
        """The chunks of the next answer, as the server sends them to the page."""
        self.evaluate("bodies.length = 0")
        self.ask(text)
        self.wait()
        self.until("bodies.length > 0")
        lines = str(self.evaluate("bodies[0]")).splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    @property
    def chats(self) -> list[dict[str, Any]]:
        """The bodies of the chat requests, as the page made them."""
        sent = [r for r in self.requests if r.url.endswith("/v1/chat/completions")]
        return [json.loads(request.post_data or "") for request in sent]

    def check(self) -> None:
        """Check that it has no errors, kept to its policy and asked no other host."""
        assert self.faults == []
        assert self.evaluate("violations") == []
        strangers = [r.url for r in self.requests if not r.url.startswith(self.origin + "/")]
        assert strangers == []

    def _on_console(self, message: Any) -> None:
        # A refused request is reported to the console by the browser itself.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(message.text)


@contextmanager
def visiting(browser: Browser, origin: str, **settings: Any) -> Iterator[Visit]:
    """The page, open; when it is left it must have behaved."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **settings})
    try:
        visit = Visit(context.new_page(), origin)
        visit.open()
        yield visit
        visit.check()
    finally:
        context.close()
