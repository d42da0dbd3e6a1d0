"""A real browser for the tests of the page. `run.sh` says which; `make test` leaves them out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from server_process import EXACT, ServerProcess, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from visit import Visit

CHROMIUM = os.environ.get("DFLASH_LOCAL_BROWSER")

collect_ignore_glob = [] if CHROMIUM else ["test_*.py"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    from playwright.sync_api import expect, sync_playwright

    # Chromium's sandbox refuses to work for root, which containers run as.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=60_000)  # five seconds would not do on a busy machine
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def locked(server: ServerProcess) -> Iterator[ServerProcess]:
    """A server with a key. It starts after the other one, so that the two do not load at once."""
    from visit import KEY

    with serving(*EXACT, "--api-key", KEY) as running:
        yield running


@pytest.fixture
def visit(browser: Browser, server: ServerProcess) -> Iterator[Visit]:
    """The server's page, open in a window of its own."""
    from visit import visiting

    with visiting(browser, server.url) as visit:
        yield visit
