"""What a model writes is shown as it is meant, and stays text whatever it is."""

from __future__ import annotations

import random
import re

import pytest
from playwright.sync_api import expect

from visit import Visit

HOSTILE = """<img src=x onerror="window.hit=1"> <script>window.hit=2</script>

<style>* {display: none}</style> <iframe src=//evil.example></iframe> &lt;b&gt;

[a](javascript:window.hit=3) [b](data:text/html,hit) ![c](http://evil.example/c.png)

```html
<svg onload="window.hit=4"></svg>
```

<a href="http://evil.example">d</a>"""

DOCUMENT = """## Sorting

A *stable* sort keeps **equal** items in `order`, see [this](https://sort.example/a_b).

- first
  - nested `x`
- second

3. three
4. four

> quoted
> on two lines

| name | time |
|------|-----:|
| merge | n log n |

```python
def sort(a):
    return a * b * c
```

---
2 * 3 * 4 and snake_case_name, ***both***, ~~gone~~, \\*kept\\*
"""

RENDERED = (
    "<h4>Sorting</h4>"
    "<p>A <em>stable</em> sort keeps <strong>equal</strong> items in <code>order</code>, see "
    '<a href="https://sort.example/a_b" target="_blank" rel="noopener noreferrer nofollow">this'
    "</a>.</p>"
    "<ul><li><p>first</p><ul><li><p>nested <code>x</code></p></li></ul></li>"
    "<li><p>second</p></li></ul>"
    '<ol start="3"><li><p>three</p></li><li><p>four</p></li></ol>'
    "<blockquote><p>quoted\non two lines</p></blockquote>"
    '<div class="table" tabindex="0"><table><thead><tr><th>name</th><th>time</th></tr></thead>'
    "<tbody><tr><td>merge</td><td>n log n</td></tr></tbody></table></div>"
    '<div class="code"><div class="bar"><span>python</span><button type="button" '
    'aria-label="Copy the code" data-copies="code">Copy</button></div><pre tabindex="0"><code>'
    "def sort(a):\n    return a * b * c</code></pre></div>"
    "<hr>"
    "<p>2 * 3 * 4 and snake_case_name, <strong><em>both</em></strong>, <del>gone</del>, "
    "*kept*</p>"
)

# The document as it is shown when its pieces come one by one, and all at once.
SHOW = """async (pieces) => {
    const { Source, View } = await import("/page/markdown.js");
    const shown = [pieces, [pieces.join("")]].map((parts) => {
        const element = document.createElement("div"), source = new Source();
        const view = new View(element, source);
        for (const part of parts) {
            source.add(part, false);
            view.update();
        }
        return element.innerHTML;
    });
    return shown;
}"""

INLINE = {"code", "span", "button", "a", "em", "strong", "del"}
TABLE = {"div", "table", "thead", "tbody", "tr", "th", "td"}
BLOCKS = {"p", "h3", "h4", "h5", "h6", "hr", "ul", "ol", "li", "blockquote", "pre"}
UNITS = ["*a ", "_a", "[a](", "`", "``a ", "> ", "- ", "|", "**a*", "![", "~~~"]


def test_hostile_text_stays_text(visit: Visit) -> None:
    visit.force(HOSTILE)
    visit.ask()
    visit.wait()
    answer = visit.page.locator(".answer .body")
    shown = answer.inner_text()
    for part in ('<img src=x onerror="window.hit=1">', "<script>", "<iframe", "&lt;b&gt;", "<svg"):
        assert part in shown
    assert answer.locator("img, script, style, iframe, svg").count() == 0
    links = answer.locator("a").evaluate_all("(links) => links.map((link) => link.href)")
    assert links == ["http://evil.example/c.png"]
    assert visit.evaluate("window.hit") is None


def test_the_policy_would_stop_what_gets_through(visit: Visit) -> None:
    """So that a fault of the page's own would do no harm."""
    markup = "document.querySelector('#messages').innerHTML = '<img src=x onerror=alert(1)>'"
    with pytest.raises(Exception, match="TrustedHTML"):
        visit.evaluate(markup)
    visit.evaluate(
        """() => {
            const image = document.createElement("img");
            image.src = "http://evil.example/x.png";
            document.body.append(image);
        }"""
    )
    visit.until("violations.length >= 2")
    assert {"require-trusted-types-for", "img-src"} <= set(visit.evaluate("violations"))
    # What the test did is not the page's doing.
    visit.faults.clear()
    visit.requests = [r for r in visit.requests if "evil.example" not in r.url]
    visit.evaluate("violations.length = 0")


def test_a_document(visit: Visit) -> None:
    slowly, at_once = visit.evaluate(SHOW, list(DOCUMENT))
    assert at_once == RENDERED
    assert slowly == RENDERED


def test_a_document_from_the_model(visit: Visit) -> None:
    visit.force(DOCUMENT)
    visit.choose("never")
    visit.ask()
    visit.wait()
    answer = visit.page.locator(".answer .body")
    assert answer.inner_html() == RENDERED
    expect(answer.locator("li li")).to_have_text("nested x")


@pytest.mark.parametrize("seed", range(3))
def test_any_text_is_shown_alike_however_it_comes(visit: Visit, seed: int) -> None:
    generator = random.Random(seed)
    alphabet = ["*", "_", "`", "```", "~~", "[", "](", ")", "!", "|", "---", "-", "1.", "#", ">"]
    alphabet += ["\n", "\n\n", "\r\n", " ", "  ", "\\", "<", "&", "a", "b c", "http://x.y", "🙂"]
    for _ in range(40):
        pieces = generator.choices(alphabet, k=generator.randrange(1, 60))
        slowly, at_once = visit.evaluate(SHOW, pieces)
        assert slowly == at_once, pieces
        assert set(re.findall(r"<([a-z0-9]+)", at_once)) <= INLINE | TABLE | BLOCKS, pieces


@pytest.mark.parametrize("unit", UNITS)
def test_no_text_takes_long(visit: Visit, unit: str) -> None:
    """Each of these once made some renderer's time grow with the square of the text, or worse."""
    slowly, at_once = visit.evaluate(SHOW, [unit * 20_000])
    assert slowly == at_once
