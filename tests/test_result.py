"""The display of an answer, in a shell and in a notebook."""

import re
from html import unescape

from dflash_local import Model


def test_an_answer_in_a_line(model: Model) -> None:
    result = model.generate("def add(a, b):", max_tokens=40, draft_width=8, ignore_eos=True)
    assert re.fullmatch(
        r"<Result '.{1,80}…', 40 tokens, [\d.]+ tokens/s, [\d.]+ tokens per round, length>",
        repr(result),
    )
    assert result.message == {"role": "assistant", "content": result.text}
    chunks = list(model.stream("def add(a, b):", max_tokens=4))
    assert all(len(repr(chunk)) < 100 for chunk in chunks)
    assert "tiny-coder" in repr(model) and str(model.n_ctx) in repr(model)


def test_a_text_that_repeats_itself_is_seen(model: Model) -> None:
    looped = model.generate("x", grammar='root ::= ("x = 1 "){900}', max_tokens=90)
    assert looped.repeated > 45
    assert model.generate("def add(a, b):", max_tokens=40, ignore_eos=True).repeated == 0


def test_a_notebook_tints_the_drafts_and_shows_the_text_as_text(model: Model) -> None:
    grammar = 'root ::= "<b>1 & 2</b> <script>alert(1)</script>"'
    result = model.generate("x", grammar=grammar, max_tokens=64, draft_width=8)
    html = result._repr_html_()
    assert "<script" not in html and "<b>" not in html
    assert html.count("<span") == sum(piece.from_draft for piece in result.pieces)
    body = re.sub(r"<[^>]*>", "", html)
    assert unescape(body).startswith(result.text)
