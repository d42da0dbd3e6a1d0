"""`dflash-local chat`: single answers by pipe, conversations in a real terminal."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import chat_models
import tiny_coder
import vision_models
from command_line import refused, run, run_here
from dflash_local.cli.answer import write_stdout
from dflash_local.cli.chat_session import without_paths
from dflash_local.cli.line_editor import LineEditor, unquoted
from ready_command import COMMAND, started

QUESTION = "Write a function that adds two numbers."
PATIENCE = 120  # seconds until a terminal that says nothing is given up


@pytest.fixture(scope="module")
def answer() -> str:
    """The text alone. Measurements of `/stats` for all conversations are made with it."""
    done = run_here("chat", "-n", "24", "--json", QUESTION)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["text"])


def test_an_answer_is_all_that_stdout_gets(answer: str) -> None:
    done = run_here("chat", "-n", "24", QUESTION)
    assert done.stdout == answer
    assert answer and "tiny-coder" in done.stderr and "tokens/s" in done.stderr


def test_stdin_is_the_prompt_when_it_is_no_terminal(answer: str) -> None:
    assert run_here("chat", "-n", "24", stdin=f"{QUESTION}\n".encode()).stdout == answer
    assert run_here("chat", "-n", "24", "-", stdin=QUESTION.encode()).stdout == answer


def test_quiet_says_nothing_beside_the_answer(answer: str) -> None:
    done = run_here("chat", "-q", "-n", "24", QUESTION)
    assert (done.stdout, done.stderr) == (answer, "")


def prompt_tokens(done: subprocess.CompletedProcess[Any]) -> int:
    return int(json.loads(done.stdout)["stats"]["prompt_tokens"])


def test_what_is_piped_in_goes_before_the_prompt() -> None:
    asked = ("chat", "-n", "1", "--json")
    piped = run(*asked, QUESTION, stdin=b"def f(): pass\n")  # a process, with a pipe
    both = f"def f(): pass\n\n{QUESTION}".encode()
    assert prompt_tokens(piped) == prompt_tokens(run_here(*asked, "-", stdin=both))


@pytest.mark.slow
def test_status_lines_are_around_the_answer_where_both_go_to_one_place(answer: str) -> None:
    done = subprocess.run(
        [COMMAND, "chat", "-n", "24", QUESTION],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
    )
    before, found, after = done.stdout.decode().partition(answer)
    assert found and before.endswith("\n") and after.startswith("\n")
    assert "tokens/s" in after


def test_the_help_names_the_file_of_what_was_typed() -> None:
    assert "chat_history" in run_here("chat", "--help").stdout


def test_a_system_message_is_part_of_the_prompt() -> None:
    asked = ("chat", "-n", "1", "--json", QUESTION)
    under = run_here(*asked, "--system", "You write Python.")
    assert prompt_tokens(under) > prompt_tokens(run_here(*asked))


def test_thinking_can_be_turned_off(answer: str) -> None:
    """The tiny target's template knows no reasoning, so the answer stays what it was."""
    asked = ("--chat-template-kwargs", '{"enable_thinking": false}')
    assert run_here("chat", "-n", "24", "--no-thinking", QUESTION).stdout == answer
    assert run_here("chat", "-n", "24", *asked, QUESTION).stdout == answer


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments of a chat whose model thinks before it answers, always the same."""
    folder = tmp_path_factory.mktemp("thinker")
    target = chat_models.with_template(tiny_coder.pair()[0], folder / "thinks.gguf", "qwen3")
    grammar = folder / "answer.gbnf"
    grammar.write_text('root ::= "<think>\\nHm.\\n</think>\\n\\nYes."\n')
    return ("--target", str(target), "--grammar-file", str(grammar), "--ctx", "512")


@pytest.mark.slow
def test_a_thought_is_no_part_of_the_answer(thinker: tuple[str, ...]) -> None:
    assert run_here("chat", "-q", *thinker, "Is it?").stdout == "Yes."
    told = json.loads(run_here("chat", "-q", "--json", *thinker, "Is it?").stdout)
    assert (told["content"], told["reasoning"]) == ("Yes.", "Hm.")
    assert told["text"].startswith("<think>")


@pytest.mark.parametrize("arguments", [[""], ["  \n"], ["--system", "", "hello"]])
def test_empty_texts_are_refused(arguments: list[str]) -> None:
    assert "empty" in refused("chat", *arguments)


# What a message is, key by key.


def typed(keys: str) -> str:
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys)
        editor = LineEditor({}, input=keyboard, output=DummyOutput(), history=InMemoryHistory())
        return editor.read()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("one line\r", "one line"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ('"""one\rtwo"""\r', "one\ntwo"),
        ('"""\r  one\r\rtwo\r"""\r', "  one\n\ntwo"),
        ("\x1b[200~one\ntwo\x1b[201~\r", "one\ntwo"),
        ('say """\r', 'say """'),
        ("\r", ""),
    ],
)
def test_keys_of_a_message(keys: str, message: str) -> None:
    assert typed(keys) == message


@pytest.mark.parametrize(("keys", "error"), [("\x03", KeyboardInterrupt), ("\x04", EOFError)])
def test_keys_that_leave_a_message(keys: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        typed(keys)


def test_quotes_inside_a_message_stay() -> None:
    assert unquoted('def f():\n    """Doc."""') == 'def f():\n    """Doc."""'


# Conversations, in a terminal.

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])")
READY = "\x1b[?2004h"  # the line editor is open


class Terminal:
    """A `dflash-local chat` whose stdin and stderr are a terminal; stdout is a file, or also it."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        stdout_too: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        master, slave = pty.openpty()
        self._master = master
        self._seen = 0
        self._text = ""
        self._stdout = folder / "stdout"
        # All that was measured already, but messages of no other conversation.
        cache = folder / "cache"
        if not cache.exists():
            shutil.copytree(os.environ["DFLASH_LOCAL_CACHE"], cache)
        set_to = os.environ | {
            "TERM": "xterm-256color",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "DFLASH_LOCAL_CACHE": str(cache),
            "XDG_STATE_HOME": str(folder / "state"),
            "COLUMNS": "200",
            **(environment or {}),
        }
        with self._stdout.open("wb") as file:
            self.process = started(
                "chat",
                *arguments,
                stdin=slave,
                stdout=slave if stdout_too else file,
                stderr=slave,
                environment=set_to,
                has_terminal=True,
            )
        os.close(slave)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> str:
        """Wait until the terminal shows `text` after what was expected before; all up to there."""
        deadline = time.monotonic() + PATIENCE
        while (end := self._text.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self._text[self._seen :]!r}"
            if not self._read():
                raise AssertionError(f"closed without {text!r}: {self._text[self._seen :]!r}")
        shown = self._text[self._seen : end + len(text)]
        self._seen = end + len(text)
        return ESCAPES.sub("", shown)

    def ask(self, message: str) -> str:
        """Type a message at the open editor; the whole reply, which lets the editor open again."""
        self.type(f"{message}\r")
        return self.expect(READY)

    def n_prompt(self) -> int:
        """The tokens of the last prompt, as `/stats` has them."""
        found = re.search(r"prompt +(\d+) tokens", self.ask("/stats"))
        assert found
        return int(found[1])

    def saved(self) -> list[dict[str, Any]]:
        """The messages that `/save` writes."""
        file = self._stdout.with_name("saved.json")
        assert "saved in" in self.ask(f"/save {file}")
        messages: list[dict[str, Any]] = json.loads(file.read_text())["messages"]
        return messages

    def everything(self) -> str:
        """All that the terminal got so far, with its escapes."""
        return self._text

    def answers(self) -> str:
        return self._stdout.read_text()

    def close(self) -> int:
        while self._read():
            pass
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # Linux ends a terminal without processes so, macOS with nothing read
            piece = b""
        self._text += piece.decode("utf-8", "replace")
        return bool(piece)


@pytest.fixture
def open_terminal(tmp_path: Path, answer: str) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, **options: Any) -> Terminal:
        opened.append(Terminal(tmp_path, *arguments, **options))
        opened[-1].expect(READY)
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.kill()


OpenTerminal = Callable[..., Terminal]


def test_a_conversation(open_terminal: OpenTerminal, answer: str) -> None:
    terminal = open_terminal("-n", "24")
    terminal.type("nothing of this")
    terminal.expect("this")
    terminal.type("\x03")  # clears it
    terminal.expect(READY)
    assert "tokens/s" in terminal.ask(QUESTION)
    assert terminal.answers() == answer + "\n"
    stats, n = terminal.ask("/stats"), terminal.n_prompt()
    assert "rounds by their tokens" in stats and "plan" in stats and "exact" in stats
    terminal.ask("And one that subtracts them.")  # what was said before is part of the prompt
    assert terminal.n_prompt() > n + 24
    before = terminal.answers()

    terminal.ask("/reset")
    terminal.ask(QUESTION)
    assert terminal.answers() == f"{before}{answer}\n"

    assert "/reset" in terminal.ask("/help")
    assert "/help" in terminal.ask("/nonsense")
    terminal.ask("")
    assert terminal.answers() == f"{before}{answer}\n"
    terminal.type("/ex\t")
    terminal.expect("/exit")
    terminal.type("\r")
    assert terminal.close() == 0


@pytest.mark.slow
def test_a_picture_goes_with_the_next_message(
    open_terminal: OpenTerminal, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("vision")
    target = vision_models.write_vision_target(folder / "seeing.gguf", "qwen3vl")
    projector = vision_models.write_projector(folder / "mmproj-seeing.gguf", target)
    shown, broken = folder / "a.png", folder / "b.png"
    shown.write_bytes(vision_models.picture(256, 256))
    broken.write_text("no picture")
    files = ("--target", str(target), "--mmproj", str(projector), "--ctx", "1024")
    terminal = open_terminal("-n", "8", "--temp", "0", *files)
    assert "none that can be read" in terminal.ask(f"/image {broken}")
    assert "no image can be read" in terminal.ask(f"/image {folder / 'c.png'}")
    assert "images: 1" in terminal.ask(f"/image {shown}")
    terminal.ask(QUESTION)
    n = terminal.n_prompt()
    assert 256 < n < 400
    terminal.ask("And now?")
    assert n < terminal.n_prompt() < 512
    terminal.saved()
    terminal.ask("/clear")
    terminal.ask(QUESTION)
    assert terminal.n_prompt() < 256
    terminal.ask(f"/load {tmp_path / 'saved.json'}")
    terminal.ask("/undo")
    terminal.ask("/retry")
    assert terminal.n_prompt() == n
    for pasted in (str(shown), f"'{shown}'", shown.as_uri()):
        terminal.ask("/clear")
        assert "images: 1" in terminal.ask(f"{pasted} ")
        terminal.ask(QUESTION)
        assert terminal.n_prompt() == n
        terminal.ask("/clear")
        terminal.ask(f"{QUESTION} {pasted}")
        assert terminal.n_prompt() == n
    terminal.ask("/clear")
    assert "none that can be read" in terminal.ask(str(broken))
    terminal.ask(QUESTION)
    terminal.ask(f"/image {shown}")
    terminal.ask("/retry")
    assert terminal.n_prompt() < 256
    terminal.ask("And now?")
    assert terminal.n_prompt() > 256, "it waits for the next message"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{}", ""),
        ("{} what is it?", "what is it?"),
        ("{} and {}", "and"),
        ("it's '{}' isn't it", "it's  isn't it"),
        ('"{}"', ""),
        ("see cat.png", "see cat.png"),
        ("/nowhere/cat.png", "/nowhere/cat.png"),
    ],
)
def test_paths_in_a_message_are_taken_out(written: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "it's a cat.PNG"
    path.write_bytes(b"")
    escaped = re.sub(r"([ '])", r"\\\1", str(path))
    for quoted in ("'{}'", '"{}"'):
        if quoted in written:
            escaped = str(path).replace("'", r"'\''" if quoted[0] == "'" else "'")
    found = without_paths(written.replace("{}", escaped))
    assert found == (text, [path] * written.count("{}"))


@pytest.mark.slow
def test_a_narrow_terminal_has_whole_words(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal("-n", "24", "--draft-width", "8", environment={"COLUMNS": "40"})
    terminal.ask(QUESTION)
    lines = terminal.ask("/stats").replace("\r", "").split("\n")
    assert any("#" in line for line in lines) and all(len(line) <= 40 for line in lines[1:-1])
    assert any(line.endswith("from the") for line in lines)


def test_a_thought_is_dim_in_a_terminal(
    open_terminal: OpenTerminal, thinker: tuple[str, ...], tmp_path: Path
) -> None:
    terminal = open_terminal(*thinker, stdout_too=True)
    assert "Hm.\r\n\r\nYes." in terminal.ask("Is it?")
    assert re.search(r"\x1b\[2(;3[24])?mH", terminal.everything())  # word by word
    [_, answer] = terminal.saved()
    assert (answer["content"], answer["reasoning_content"]) == ("Yes.", "Hm.")


@pytest.mark.slow
def test_thinking_goes_back_to_what_was_usual_and_stays_with_another_model(
    open_terminal: OpenTerminal, thinker: tuple[str, ...]
) -> None:
    terminal = open_terminal("--no-thinking", *thinker)

    def n_prompt() -> int:
        terminal.ask("/clear")
        terminal.ask("Is it?")
        return terminal.n_prompt()

    without = n_prompt()
    terminal.ask("/set thinking on")
    assert n_prompt() != without
    terminal.ask("/set thinking default")
    assert n_prompt() == without
    terminal.ask(f"/model {thinker[1]}")
    assert n_prompt() == without


@pytest.mark.slow
def test_messages_of_earlier_conversations_come_back(
    open_terminal: OpenTerminal, answer: str, tmp_path: Path
) -> None:
    first = open_terminal("-n", "24")
    first.ask(QUESTION)
    first.type("\x04")
    assert first.close() == 0
    (history,) = tmp_path.rglob("chat_history")
    assert history.stat().st_mode & 0o077 == 0

    second = open_terminal("-n", "24")
    second.type("\x1b[A")
    second.expect(QUESTION[-8:])
    second.ask("")
    assert second.answers() == answer + "\n"


def test_esc_and_ctrl_c_stop_the_answer_alone_and_keys_are_not_shown_in_it(
    open_terminal: OpenTerminal, tmp_path: Path
) -> None:
    grammar = tmp_path / "long.gbnf"
    grammar.write_text('root ::= ("x = 1 "){900}')
    terminal = open_terminal("-n", "2000", "--grammar-file", str(grammar), stdout_too=True)
    terminal.type("Write a long program.\r")
    terminal.expect("x = 1")
    terminal.type("typed\x1b[A")  # an arrow key is no Esc
    answer = terminal.expect("x = 1") + terminal.expect("x = 1")
    terminal.type("\x1b")
    answer += terminal.expect("stopped")
    assert "typed" not in answer and "^[" not in answer
    assert "typed" in terminal.expect("typed")  # it waited for the line editor
    terminal.type("\x03")
    terminal.expect(READY)
    terminal.type("Write a long program.\r")
    terminal.expect("x = 1")
    terminal.type("\x03")
    assert "stopped" in terminal.expect(READY)
    assert "tokens/s" in terminal.ask("/stats")
    terminal.type("\x04")
    assert terminal.close() == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("environment", "is_tinted"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
    ids=str,
)
def test_drafted_text_is_tinted_where_the_user_wants_colours(
    open_terminal: OpenTerminal, answer: str, environment: dict[str, str], is_tinted: bool
) -> None:
    asked = ("-n", "24", "--draft-width", "8")
    terminal = open_terminal(*asked, stdout_too=True, environment=environment)
    begin = len(terminal.everything())
    shown = terminal.ask(QUESTION)
    assert answer.strip() in shown.replace("\r", "")
    assert bool(re.search(r"[;[]32m", terminal.everything()[begin:])) == is_tinted


def test_the_commands_of_a_conversation(
    open_terminal: OpenTerminal, answer: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    terminal = open_terminal("-n", "24")
    assert "no message" in terminal.ask("/retry")
    terminal.ask(QUESTION)
    terminal.ask("/retry")
    assert terminal.answers() == f"{answer}\n" * 2
    assert [message["content"] for message in terminal.saved()] == [QUESTION, answer]

    assert "forgotten" in terminal.ask("/clear")
    assert "nonesuch.json: " in terminal.ask("/load nonesuch.json")
    assert "messages: 2" in terminal.ask(f"/load {saved}")
    terminal.ask("/retry")
    assert terminal.answers() == f"{answer}\n" * 3
    assert "no saved conversation" in terminal.ask(f"/load {__file__}")
    assert "FILE" in terminal.ask("/save")

    assert "no system message" in terminal.ask("/system")
    terminal.ask("/system You write Python.")
    assert "You write Python." in terminal.ask("/system")
    assert terminal.saved() == [{"role": "system", "content": "You write Python."}]


def test_an_answer_that_was_cut_goes_on_and_a_slash_and_a_word_is_a_command_or_an_error(
    open_terminal: OpenTerminal, answer: str, tmp_path: Path
) -> None:
    terminal = open_terminal("-n", "10", "--temp", "0")
    assert "/continue" in terminal.ask(QUESTION)
    terminal.ask("/continue")
    terminal.ask("/set max-tokens 4")
    terminal.ask("/continue")
    question, whole = terminal.saved()
    assert (question["content"], whole["content"]) == (QUESTION, answer)
    assert "taken back" in terminal.ask("/undo")
    assert "no message was sent" in terminal.ask("/edit")
    terminal.ask(QUESTION)
    terminal.type("/edit\r")
    terminal.expect(QUESTION[-8:])  # it stands in the line editor
    terminal.ask(" Please.")
    edited = terminal.saved()
    assert edited[0]["content"] == f"{QUESTION} Please." and len(edited) == 2

    terminal.ask("/clear")
    before = terminal.answers()
    assert "/set temp 0.7" in terminal.ask("/temp 0.7")
    assert "no command /foo" in terminal.ask("/foo is a word")
    assert "temp is 0.5" in terminal.ask("/set temperature 0.5")
    assert re.search(r"temp +0\.5", terminal.ask("/set"))
    assert "did you mean temp?" in terminal.ask("/set tmp 1")
    assert "not a number" in terminal.ask("/set top_p 7")
    assert "as usual" in terminal.ask("/set temp default")
    terminal.ask("/set draft-width 500")
    refused = terminal.ask("hello")
    assert "--draft-width is 500" in refused and "/clear" not in refused
    terminal.ask("/set draft-width default")
    assert terminal.answers() == before, "none of that went to the model"
    terminal.ask("//etc is a folder")
    assert terminal.saved()[0]["content"] == "/etc is a folder"


def test_a_text_that_repeats_itself_is_said_and_no_boast(tmp_path: Path) -> None:
    grammar = tmp_path / "long.gbnf"
    grammar.write_text('root ::= ("x = 1 "){900}')
    asked = ("-n", "90", "--draft-width", "8", "--grammar-file", str(grammar))
    told = run_here("chat", *asked, QUESTION).stderr
    assert "repeats itself" in told and "tokens per round" not in told


@pytest.mark.slow
def test_another_model_goes_on_with_the_conversation(
    open_terminal: OpenTerminal, answer: str
) -> None:
    target, drafter = tiny_coder.pair()
    terminal = open_terminal("-n", "24")
    terminal.ask(QUESTION)
    assert drafter.name in terminal.ask("/model")
    told = terminal.ask(f"/model {target}")
    assert target.name in told and "none" in told
    terminal.ask("/retry")
    assert "error" in terminal.ask("/model nonesuch.gguf")
    terminal.ask("/retry")
    assert terminal.answers() == f"{answer}\n" * 3


@pytest.mark.slow
def test_a_message_beyond_the_context_is_taken_back(
    open_terminal: OpenTerminal, answer: str
) -> None:
    terminal = open_terminal("-n", "24", "--ctx", "256")
    assert "error" in terminal.ask("word " * 600)
    terminal.ask(QUESTION)
    assert terminal.answers() == answer + "\n"


def test_a_terminal_gets_no_control_characters(
    open_terminal: OpenTerminal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grammar = tmp_path / "escape.gbnf"
    grammar.write_text(r'root ::= "a\x1B[31mb"')
    terminal = open_terminal("--grammar-file", str(grammar), "-q", stdout_too=True)
    assert "a\N{REPLACEMENT CHARACTER}[31mb" in terminal.ask(QUESTION)
    write_stdout("a\x1b[31mb")
    assert capsys.readouterr().out == "a\x1b[31mb"


def test_json_wants_one_prompt() -> None:
    from narrow_terminal import lines_on

    told = lines_on(200, "chat", "--json", variables=os.environ)
    assert told[0].startswith("dflash-local: error: --json answers one prompt")
