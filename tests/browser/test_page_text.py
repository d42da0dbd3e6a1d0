"""A model's text is shown as it is meant, and always stays text."""

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

FORMULAS = r"""It is $x^2$, \(a_1\) or $5 and $10, `$c$` and \\(d\\).
\[
x
- y
= z
\]
> quoted
> $$
> \frac{1}{2}
> $$

$$a$$ but $$ open

$$
never closed

# Head"""

CODE = (
    '<div class="code"><div class="bar"><span>{}</span><button type="button" '
    'aria-label="Copy the code" data-copies="code">Copy</button></div><pre tabindex="0"><code>'
    "{}</code></pre></div>"
)

RENDERED = (
    "<h4>Sorting</h4>"
    "<p>A <em>stable</em> sort keeps <strong>equal</strong> items in <code>order</code>, see "
    '<a href="https://sort.example/a_b" target="_blank" rel="noopener noreferrer nofollow">this'
    "</a>.</p>"
    "<ul><li><p>first</p><ul><li><p>nested <code>x</code></p></li></ul></li>"
    "<li><p>second</p></li></ul>"
    '<ol start="3"><li><p>three</p></li><li><p>four</p></li></ol>'
    "<blockquote><p>quoted\non two lines</p></blockquote>"
    '<div class="table" tabindex="0"><table><thead><tr><th>name</th><th class="right">time</th>'
    '</tr></thead><tbody><tr><td>merge</td><td class="right">n log n</td></tr></tbody></table>'
    "</div>"
    + CODE.format(
        "python",
        '<span class="hljs-keyword">def</span> <span class="hljs-title">sort</span>('
        '<span class="hljs-params">a</span>):\n    <span class="hljs-keyword">return</span> '
        "a * b * c",
    )
    + "<hr>"
    "<p>2 * 3 * 4 and snake_case_name, <em><strong>both</strong></em>, <del>gone</del>, "
    "*kept*</p>"
)

LINK = '<a href="mailto:i@j.k" target="_blank" rel="noopener noreferrer nofollow">i@j.k</a>'
BOX = '<input type="checkbox" disabled="" aria-label="{}"{}>'
SHOWN = {
    DOCUMENT: RENDERED,
    # Blocks within blocks.
    "1. one\n\n   ```py\n   a\n\n     b\n   ```\n2. > two  \n   > *lines*\n": (
        '<ol start="1"><li><p>one</p>' + CODE.format("py", "a\n\n  b") + "</li>"
        "<li><blockquote><p>two<br><em>lines</em></p></blockquote></li></ol>"
    ),
    # Tasks have boxes.
    "- [x] done *well*\n- [ ] to do\n- plain\n": (
        '<ul><li class="task"><p>' + BOX.format("done", ' checked=""') + " done <em>well</em></p>"
        '</li><li class="task"><p>' + BOX.format("to do", "") + " to do</p></li>"
        "<li><p>plain</p></li></ul>"
    ),
    # Links that lead elsewhere are shown as written.
    "[*a* b](c.md) [d] [e][f] ![g](h.png) <i@j.k>": (
        f"<p>[<em>a</em> b](c.md) [d] [e][f] ![g](h.png) {LINK}</p>"
    ),
}

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

INLINE = {"code", "span", "button", "a", "em", "strong", "del", "br"}
TABLE = {"div", "table", "thead", "tbody", "tr", "th", "td"}
BLOCKS = {"p", "h3", "h4", "h5", "h6", "hr", "ul", "ol", "li", "blockquote", "pre", "input"}
UNITS = [
    *("$", "$a", "$$ ", "\\(a ", "\\[\n", "$$\n", "a $$\n", "$x$ ", "$$\nx\n$$\n\n", "- [ ] "),
    *("*a ", "_a", "[a](", "`", "``a ", "> ", "- ", "|", "**a*", "![", "~~~", "*_", "> - "),
]


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


def test_a_text_is_shown_as_it_is_meant(visit: Visit) -> None:
    for text, expected in SHOWN.items():
        assert visit.evaluate(SHOW, list(text)) == [expected, expected]


def test_columns_are_aligned_as_they_say(visit: Visit) -> None:
    visit.force("| a | b | c | d |\n|:--|--:|:-:|---|\n| 1 | 2 | 3 | 4 |\n")
    visit.answer()
    for row in ("th", "td"):
        sides = visit.page.locator(f".answer {row}").evaluate_all(
            "(cells) => cells.map((cell) => getComputedStyle(cell).textAlign)"
        )
        assert sides == ["left", "right", "center", "left"]


def test_formulas_are_set_and_money_is_not(visit: Visit) -> None:
    slowly, shown = visit.evaluate(SHOW, list(FORMULAS))
    assert slowly == shown
    text = re.sub(r"<math.*?</math>", "MATH", shown)
    inline = '<span class="formula">MATH</span>'
    block = '<span class="formula display">MATH</span>'
    assert text == (
        f"<p>It is {inline}, {inline} or $5 and $10, <code>$c$</code> and \\(d\\).</p>"
        f"<p>{block}</p><blockquote><p>quoted</p><p>{block}</p></blockquote>"
        f"<p>{block} but $$ open</p><p>$$\nnever closed</p><h3>Head</h3>"
    )
    assert shown.count("<mfrac>") == 1 and shown.count("<msup>") == 1


def test_hostile_formulas_do_nothing(visit: Visit) -> None:
    """Names and links in a formula are left out; text that is no formula is shown as written."""
    for tex in (
        r"\href{https://evil.example}{x}",
        r"\includegraphics{https://evil.example/x.png}",
        r"\url{https://evil.example}",
        r"\id{key}{x}",
        r"\begin{align} a \label{key} \end{align} \ref{key}",
        r"\def\a{\a\a}\a",
        r"\frac{",
        "{" * 1500,
    ):
        slowly, shown = visit.evaluate(SHOW, ["$", tex, "$ and $$\n", tex, "\n$$"])
        assert slowly == shown
        for part in ("href", "<a", "<img", " id=", "src"):
            assert part not in shown.replace("\\href", "").replace("\\id", ""), tex
    visit.evaluate("key.value")  # still the page's own


def test_code_has_colors_and_keeps_its_tints(visit: Visit) -> None:
    visit.choose("always")
    visit.force("```python\ndef add(a, b):\n    return 'sum'  # of two\n```\n")
    visit.answer()
    code = visit.page.locator(".answer code")
    assert code.inner_text() == "def add(a, b):\n    return 'sum'  # of two"
    for name, text in {
        "keyword": "def",
        "title": "add",
        "string": "'sum'",
        "comment": "# of two",
    }.items():
        expect(code.locator(f".hljs-{name}").first).to_have_text(text)
    assert code.locator(".draft").count() > 0
    shown = set(code.locator("span").evaluate_all("(spans) => spans.map((s) => s.className)"))
    assert {"draft", "hljs-keyword"} <= shown


def test_a_row_has_the_columns_of_its_table(visit: Visit) -> None:
    _, shown = visit.evaluate(SHOW, ["a | b\n-|-\n| | `x\\|y` | z |\nc\n"])
    rows = re.findall("<tr>.*?</tr>", shown)
    assert rows == [
        "<tr><th>a</th><th>b</th></tr>",
        "<tr><td></td><td><code>x\\|y</code></td></tr>",
        "<tr><td>c</td><td></td></tr>",
    ]


def test_any_text_is_shown_alike_however_it_comes(visit: Visit) -> None:
    generator = random.Random(0)
    alphabet = ["*", "_", "`", "```", "~~", "[", "](", ")", "!", "|", "---", "-", "1.", "#", ">"]
    alphabet += ["\n", "\n\n", "\r\n", " ", "  ", "\\", "<", "&", "a", "b c", "http://x.y", "🙂"]
    alphabet += ["$", "$$", "\\[", "\\]", "\\(", "\\)", "[ ]", "x^2", "```py\n", "if "]
    for _ in range(120):
        pieces = generator.choices(alphabet, k=generator.randrange(1, 60))
        slowly, at_once = visit.evaluate(SHOW, pieces)
        assert slowly == at_once, pieces
        names = set(re.findall(r"<([a-z0-9]+)", re.sub("<math.*?</math>", "", at_once)))
        assert names <= INLINE | TABLE | BLOCKS, pieces


def test_no_text_takes_long(visit: Visit) -> None:
    """Each of these once made some renderer's time grow with the square of the text, or worse."""
    for unit in UNITS:
        slowly, at_once = visit.evaluate(SHOW, [unit * 20_000])
        assert slowly == at_once, unit
