"""Lines beside an answer, its colours, and the bars of long work."""

import io
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from dflash_local.cli import progress
from dflash_local.cli.answer_view import AnswerView
from dflash_local.cli.report import summary
from dflash_local.cli.terminal import Speaker, fitted
from dflash_local.result import Piece, PromptProgress, Result
from dflash_local.stats import Stats

ANSWER = """# Adding

Use **both** numbers, as `add` does:

```python
def add(a, b):
    return a + b  # the sum
```
그리고 끝. No fence here: return
"""
STYLE = re.compile(r"\x1b\[([0-9;]*)m([^\x1b]*)\x1b\[0m")


def terminal(width: int = 80) -> Console:
    """One that can do everything, whatever TERM and NO_COLOR say of ours."""
    style = {"force_terminal": True, "color_system": "standard", "_environ": {}}
    return Console(file=io.StringIO(), width=width, **style)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", written(console))


def answered(
    text: str, size: int, width: int = 80, *, drafts: bool = False, is_thought: bool = False
) -> Console:
    """The terminal after an answer that came in pieces of so many characters."""
    console = terminal(width)
    view = AnswerView(console)
    for n in range(0, len(text), size):
        if not is_thought:
            view.add([Piece(text[n : n + size], drafts and n % 2 == 0)])
        view.write(text[n : n + size], is_thought=is_thought)
    view.finish()
    return console


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("width", [20, 200])
def test_an_answer_is_shown_whole_however_it_comes(size: int, width: int) -> None:
    shown = plain(answered(ANSWER, size, width, drafts=True))
    assert shown.split() == ANSWER.split()  # at 20 columns there are line breaks for blanks
    assert width == 20 or shown == ANSWER
    begin, end = ANSWER.index("```"), ANSWER.rindex("```")
    assert ANSWER[begin:end] in shown, "code is left as it is"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("is_thought", [False, True])
def test_words_do_not_break_at_the_edge(size: int, is_thought: bool) -> None:
    text = "Gai c'est naïveté: une femtoseconde, une fraction de seconde; voilà tout. " * 6
    lines = plain(answered(text, size, 24, is_thought=is_thought)).split("\n")
    assert max(map(len, lines)) <= 24 and " ".join(lines).split() == text.split()
    assert not [line for line in lines[1:] if line.startswith(" ")]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_markdown_and_code_have_their_weights(size: int) -> None:
    shown = written(answered(ANSWER, size))
    styled = [(codes, text.strip()) for codes, text in STYLE.findall(shown)]
    assert any(text.endswith("Adding") and codes == "1" for codes, text in styled)
    assert any("both" in text and codes == "1" for codes, text in styled)
    assert ("1", "def") in styled and ("1", "return") in styled
    assert [codes for codes, text in styled if text == "return"] == ["1"]  # not in the prose
    assert any("sum" in text and codes == "3" for codes, text in styled)


def test_drafted_text_and_no_other_is_tinted() -> None:
    console = terminal()
    view = AnswerView(console)
    view.add([Piece("one ", False), Piece("two three ", True), Piece("four", True, True)])
    view.write("one two three four")
    view.finish()
    assert STYLE.findall(written(console)) == [("32", "two three "), ("34", "four")]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_words_in_bold_are_bold_from_the_first_on(size: int) -> None:
    text = "It **is one of these**, a `lambda x: x` is no `def`."
    console = answered(text, size)
    bold = "".join(part for codes, part in STYLE.findall(written(console)) if codes == "1")
    assert bold == "**is one of these**" and plain(console) == text


def test_a_thought_is_dim_and_keeps_its_tints() -> None:
    console = terminal()
    view = AnswerView(console)
    view.add([Piece("<think>\nso ", False), Piece("two", True), Piece("</think>\n\ntw", False)])
    view.write("so two", is_thought=True)
    view.add([Piece("o", True)])
    view.write("two")
    view.finish()
    assert STYLE.findall(written(console)) == [("2", "so "), ("2;32", "two"), ("32", "o")]


def test_an_answer_cannot_control_the_terminal() -> None:
    shown = plain(answered("a\x1b]0;own\x07\x9bb [bold]c[/bold] :smile:", 1000))
    assert not set(shown) & {"\x1b", "\x07", "\x9b"} and "[bold]c[/bold] :smile:" in shown


def test_facts_keep_within_the_terminal() -> None:
    facts = (
        "name   one two three four\na sentence of some more words\na  b  c  d  e  f  g  h\n\n x\n"
    )
    assert fitted(facts, 20).splitlines() == [
        *("name   one two three", "       four"),
        *("a sentence of some", "more words"),
        *("a  b  c  d  e  f  g  h", "", " x"),
    ]
    assert fitted(facts, 80) == facts
    assert fitted("  one two three four\n", 14) == "  one two\n  three four\n"


def test_lines_wait_for_the_end_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    say = Speaker(False)
    say("before")
    with say.answering():
        say("drafting is off")
        assert capsys.readouterr().err == "before\n"
        say.in_line = True
    say("after")
    assert capsys.readouterr().err == "\ndrafting is off\nafter\n"


def test_a_quiet_speaker_ends_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    say = Speaker(True)
    with say.answering():
        say("drafting is off")
        say.in_line = True
    assert capsys.readouterr().err == ""


def test_a_long_prompt_has_a_bar_until_the_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0)
    console = terminal()
    with progress.prompt_progress(console) as tell:
        tell(PromptProgress(400, 0, 300, 0.1))
        end = time.monotonic() + 60
        while not written(console) and time.monotonic() < end:
            time.sleep(0.01)
        tell(None)
        shown = written(console)
        assert "reading 400 tokens" in shown
    assert written(console) == shown


def test_loading_has_a_bar_and_lines_stay_above_it() -> None:
    console = terminal()
    with progress.loading_progress(console, "target.gguf") as update:
        assert update is not None
        update(0.5)
        console.print("a line")
        update(1.0)
    assert "loading target.gguf" in written(console) and "a line\n" in written(console)
    with progress.loading_progress(None, "target.gguf") as nothing:
        assert nothing is None


def test_an_answer_that_was_hardly_drafted_says_why() -> None:
    off = "drafting is off: a draft alone costs 4.5 steps on this device"
    rare, often = Stats(drafting=off), Stats(drafting=off)
    for emitted in (2, *[1] * 9):
        rare.record_round(drafted=emitted - 1, emitted=emitted)
    often.record_round(drafted=15, emitted=8)
    result = Result("text", [1] * 11, "stop", rare, 0)
    assert summary(result, 100).endswith(f"; {off}")
    for other in (often, replace(rare, drafting="drafting is on")):
        assert "drafting" not in summary(replace(result, stats=other), 100)
