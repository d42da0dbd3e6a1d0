"""simonw/llm, which finds the plugin by its entry point."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import run

QUESTION = "Implement `add` in Python: Return the sum of two numbers."


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))

    def ask(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return ask


def test_an_answer_is_that_of_our_own_command(ask) -> None:
    ours = run("chat", "-q", "-n", "24", QUESTION, stdin=b"").stdout.decode()
    asked = ("-m", "dflash", "-o", "max_tokens", "24", "-o", "temperature", "0")
    assert ask(*asked, QUESTION).rstrip("\n") == ours.rstrip("\n")
    assert ask(*asked, "--no-stream", QUESTION).rstrip("\n") == ours.rstrip("\n")
    # The conversation goes on, and both answers are in llm's log.
    ask("-c", "-o", "max_tokens", "8", "And `sub`?")
    log = json.loads(ask("logs", "-n", "0", "--json"))
    assert len(log) == 3 and len({entry["conversation_id"] for entry in log}) == 2
    assert all(entry["output_tokens"] for entry in log)


def test_the_settings_of_chats_hold(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text("[chat]\ntemp = 0\nmax-tokens = 6\n")
    monkeypatch.setenv("DFLASH_LOCAL_CONFIG", str(settings))
    ours = run("chat", "-q", QUESTION, stdin=b"").stdout.decode()
    assert ask("-m", "dflash", QUESTION).rstrip("\n") == ours.rstrip("\n")
    assert len(ask("-m", "dflash", "-o", "max_tokens", "24", QUESTION)) > len(ours)


def test_an_answer_follows_a_schema(ask) -> None:
    told = ask("-m", "dflash", "-o", "max_tokens", "64", "--schema", "ok bool", QUESTION)
    assert json.loads(told)["ok"] in (True, False)
