"""No text of a file reaches the terminal as more than text."""

import io
from pathlib import Path

import pytest
from rich.console import Console

import gguf_files
import tiny_coder
from command_line import run_here
from dflash_local.cli.progress import loading_progress
from dflash_local.printable import shown

HOSTILE = "\x1b]0;own\x07\x1b[2J\x9b31m\u202eevil\u2066"


def check(text: str) -> None:
    assert "evil" in text
    assert not [c for c in text if not c.isprintable() and c not in "\n\t"], ascii(text)


@pytest.mark.parametrize(
    "key", ["general.architecture", "tokenizer.ggml.pre", "tokenizer.ggml.model", "file name"]
)
def test_no_text_of_a_file_controls_the_terminal(key: str, tmp_path: Path) -> None:
    target, drafter = tiny_coder.pair()
    name = f"{HOSTILE}.gguf" if key == "file name" else "target.gguf"
    architecture = HOSTILE if key == "general.architecture" else "nonesuch-evil"
    keys = dict(gguf_files.parts(target)[0])
    keys["general.architecture"] = (architecture, gguf_files.STRING, None)
    if key.startswith("tokenizer"):
        keys["general.architecture"] = ("qwen3", gguf_files.STRING, None)
        keys[key] = (HOSTILE, gguf_files.STRING, None)
    path = gguf_files.write(tmp_path / name, keys, dict(gguf_files.parts(target)[1]))
    asked = ("complete", "--target", str(path), "--draft", str(drafter), "x")
    done = run_here(*asked)
    assert done.returncode == 2
    check(done.stderr)


def test_the_bar_of_a_load_shows_a_file_s_name_as_text() -> None:
    written = io.StringIO()
    name = f"{HOSTILE}[/red].gguf"  # nor is it taken for a style
    with loading_progress(Console(file=written, force_terminal=True), name) as update:
        assert update is not None
        update(0.5)
        update(1.0)
    # rich's own commands move and colour; none sets a title, and none turns the text around.
    assert "evil" in written.getvalue() and "[/red].gguf" in written.getvalue()
    assert not [c for c in ("\x1b]", "\x1b[2J", "\x9b", "\u202e") if c in written.getvalue()]


def test_an_answer_may_have_any_letters_and_no_commands() -> None:
    text = "é שלום 👩‍👩‍👧 a\u200fb\n\tx"
    assert shown(text) == text
    assert shown(HOSTILE).isprintable()
