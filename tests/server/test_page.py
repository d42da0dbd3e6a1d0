"""The page at `/`: its files, and what keeps it safe. Browsers try it in tests/browser."""

import re
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest

from dflash_local import load
from dflash_local.pairs.registry import USUAL
from dflash_local.server import page

FILES = sorted(page.PATHS - {"/", "/docs"})
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

NAMES = (
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/1998/Math/MathML",
    "https://github.com/highlightjs/highlight.js/",  # in its warnings
)
"""Names that look like addresses, and that no browser calls."""


class _Elements(HTMLParser):
    """Names, attributes and texts of an HTML document's elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style"):
            self.scripts.append(data.strip())


def policy(answer: httpx.Response) -> dict[str, list[str]]:
    directives = answer.headers["content-security-policy"].split("; ")
    return {name: values for name, *values in map(str.split, directives)}


def test_the_page_and_its_files(client: httpx.Client) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for path in FILES:
        found = client.get(path)
        assert found.status_code == 200
        assert found.headers["content-type"].startswith(TYPES[path.rpartition(".")[2]])
        assert found.content == files(page).joinpath(path.removeprefix("/page/")).read_bytes()


def test_all_that_the_page_loads_is_its_own(client: httpx.Client) -> None:
    elements = [e for path in ("/", "/docs") for e in _Elements(client.get(path).text).found]
    loaded = [
        str(attributes.get("src") or attributes.get("href"))
        for name, attributes in elements
        if name in ("script", "link", "img", "iframe")
    ]
    links = {str(attributes["href"]) for name, attributes in elements if name == "a"}
    assert links == {"docs", "./", "openapi.json"}
    assert "page/page.js" in loaded and "page/page.css" in loaded
    scripts = [client.get(path).text for path in FILES if path.endswith(".js")]
    imports = [f"page/{name}" for text in scripts for name in re.findall(r'from "\./(.+?)"', text)]
    assert len(imports) >= 5
    pages = {"/page/index.html", "/page/docs.html"}
    assert {f"/{path}" for path in (*loaded, *imports)} == set(FILES) - pages


def test_nothing_in_it_names_another_host(client: httpx.Client) -> None:
    for path in FILES:
        text = client.get(path).text
        for name in NAMES:
            text = text.replace(name, "")
        assert re.findall(r"(?:https?:)?//[a-z0-9]+\.[a-z]", text) == [], path
        if "/vendor/" not in path:  # lowlight knows CSS
            assert "@import" not in text and "url(" not in text


@pytest.mark.parametrize("path", ["/", "/docs", "/page/page.js", "/page/icon.svg"])
def test_headers(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert policy(answer) == {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "connect-src": ["'self'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_policy_finds_nothing_to_forbid(path: str, client: httpx.Client) -> None:
    parsed = _Elements(client.get(path).text)
    assert [text for text in parsed.scripts if text] == []
    for name, attributes in parsed.found:
        assert name != "style"
        assert not [key for key in attributes if key == "style" or key.startswith("on")]


@pytest.mark.parametrize("path", ["/", "/page/page.css"])
def test_a_file_is_sent_once(client: httpx.Client, path: str) -> None:
    first = client.get(path)
    assert first.headers["cache-control"] == "no-cache"
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"another", {etag}'):
        again = client.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
        assert "content-security-policy" in again.headers
    assert client.get(path, headers={"If-None-Match": '"another"'}).status_code == 200


def test_clients_that_probe(client: httpx.Client) -> None:
    """Some ask whether anything is there before they use the API."""
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert client.get("/", headers={"Accept": "application/json"}).status_code == 200
    refused = client.post("/", json={})
    assert refused.status_code == 405
    assert refused.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "name",
    [
        *("__init__.py", "nothing.js", "%2e%2e/app.py", "..%2fapp.py", "page.js/", "page.js%00"),
        "vendor/LICENSE",
    ],
)
def test_no_other_file_is_served(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/page/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.slow
def test_the_prompts_that_it_offers_for_the_usual_pair_are_answered_to_the_end() -> None:
    """None of the answers repeats itself until the context is full."""
    script = files(page).joinpath("page.js").read_text(encoding="utf-8")
    offered = re.search(r"const TINY = .*?prompts: \[(.*?)\]", script, re.DOTALL)
    assert offered
    prompts = re.findall(r'"(.+?)"', offered[1])
    assert len(prompts) == 3
    with load(USUAL, "none", n_ctx=512, n_gpu_layers=0, n_threads=1, quiet=True) as model:
        for prompt in prompts:
            answer = model.chat([{"role": "user", "content": prompt}], seed=1)
            assert answer.finish_reason == "stop", prompt
