"""The settings file and the environment: which value counts, and what is refused by name."""

import json
import re
import stat
from pathlib import Path

import pytest

import tiny_coder
from command_line import parsed, refused, run_here
from dflash_local.cli.main import group
from dflash_local.cli.settings import VARIABLES, default_map, template

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("DFLASH_LOCAL_CONFIG", str(path))
    return path


def n_tokens(*arguments: str, environment: dict[str, str] | None = None) -> int:
    done = run_here("complete", *arguments, "def add(a, b):", environment=environment)
    told = re.search(r"^(\d+) tokens, ", done.stderr, re.MULTILINE)
    assert told, done.stderr
    return int(told[1])


def test_the_file_is_asked_last(settings: Path) -> None:
    settings.write_text("max-tokens = 3\n[complete]\nmax-tokens = 4\n")
    assert n_tokens() == 4
    assert n_tokens(environment={"DFLASH_LOCAL_MAX_TOKENS": "5"}) == 5
    assert n_tokens("-n", "6", environment={"DFLASH_LOCAL_MAX_TOKENS": "5"}) == 6


def test_values_of_every_kind(settings: Path) -> None:
    settings.write_text(
        'exact = true\nstop = ["a", "b"]\ntensor-split = [3, 1]\ntop_p = 0.5\n[serve]\nport = 1\n'
        "[chat.chat-template-kwargs]\nenable_thinking = false\n"
    )
    found = default_map(group)
    assert found["chat"]["exact"] is True and found["chat"]["stop"] == ["a", "b"]
    assert found["chat"]["tensor_split"] == "3,1"
    assert found["chat"]["top_p"] == "0.5"
    assert json.loads(found["chat"]["chat_template_kwargs"]) == {"enable_thinking": False}
    assert found["serve"]["port"] == "1" and "port" not in found["chat"]


def test_a_server_for_all_opens_no_worker_to_all(settings: Path) -> None:
    settings.write_text('host = "0.0.0.0"\nport = 1\n[worker]\nport = 2\n')
    found = default_map(group)
    assert found["serve"]["host"] == "0.0.0.0" and "host" not in found["worker"]
    assert found["worker"]["port"] == "2"


def test_the_usual_target_is_not_what_drafters_are_held_against(settings: Path) -> None:
    settings.write_text('target = "qwen3-8b"\n[inspect]\njson = true\n')
    found = default_map(group)
    assert found["chat"]["target"] == found["serve"]["target"] == "qwen3-8b"
    assert "target" not in found["inspect"] and "target" not in found["convert"]
    target, _ = tiny_coder.pair()
    assert json.loads(run_here("inspect", str(target)).stdout)["role"] == "target"


@pytest.mark.parametrize(
    ("arguments", "draft"),
    [
        ("chat hi", "b.gguf"),
        ("chat -m other hi", None),
        ("complete -m other -md c.gguf hi", "c.gguf"),
        ("run other hi", None),
        ("pull other", None),
        ("doctor", "b.gguf"),
        ("doctor other", None),
    ],
)
def test_a_drafter_is_set_for_the_target_that_is_set(
    settings: Path, arguments: str, draft: str | None
) -> None:
    settings.write_text('target = "a.gguf"\ndraft = "b.gguf"\n')
    name, *rest = arguments.split()
    found = default_map(group)[name]
    assert parsed(name, rest, default_map=found)["draft"] == draft


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-token = 3", "max-tokens"),
        ("max_token = 3", "max_token is"),
        ("n_ctx = 5", "n_ctx is no setting"),
        ("[chatt]\ntemp = 1", "chat"),
        ("[chat]\nport = 1", "port"),
        ("temp = 'warm'", "warm"),
        ("temp = ", "TOML"),
        ("temp = true", "temp: true is"),
        ("temp = [1]", "temp: [1] is"),
        ("temp = {a = 1}", "temp: {'a': 1} is"),
        ("temp = 1979-05-27", "temp: 1979-05-27 is"),
        ("seed = 1.5", "1.5"),
        ("ctx = 512.0", "512.0"),
        ("exact = 1979-05-27", "exact: 1979-05-27 is neither true"),
        (f"temp = {'9' * 5000}", "TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(
    settings: Path, text: str, named: str
) -> None:
    settings.write_text(text)
    line = refused("complete", "x")
    assert named in line and str(settings) in line


def test_a_file_that_is_named_must_be_there(settings: Path) -> None:
    told = f"dflash-local: error: {settings}: No such file or directory\n"
    assert refused("complete", "x") == told


def test_config_shows_the_file_and_one_that_is_wrong(settings: Path) -> None:
    assert "not there yet" in run_here("config").stdout
    assert run_here("config", "--path").stdout == f"{settings}\n"
    settings.write_text("nonsense")
    assert "nonsense" in run_here("config").stdout
    settings.write_bytes(b"temp = 1 # \xff")
    assert "not UTF-8" in refused("config")


def test_a_new_file_lists_every_option(settings: Path, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "0,/^# max-tokens = /s//max-tokens = 3/" "$1"\n')
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    assert run_here("config", "--edit", environment={"EDITOR": str(editor)}).returncode == 0
    assert default_map(group)["chat"] == {"max_tokens": "3"}
    listed = set(re.findall(r"^# ([\w-]+) = ", template(group), re.M))
    options = {
        o for c in group.all_commands().values() for p in c.params if p.envvar for o in p.opts
    }
    assert {f"--{key}" for key in listed} <= options
    assert {"target", "port", "temp"} <= listed


def test_a_misspelt_variable_is_named() -> None:
    done = run_here("config", environment={"DFLASH_LOCAL_TARGTE": "x.gguf"})
    assert "DFLASH_LOCAL_TARGTE" in done.stderr and "DFLASH_LOCAL_TARGET?" in done.stderr
    assert run_here("config").stderr == ""


def test_every_variable_that_the_program_reads_is_in_its_help() -> None:
    read: set[str] = set()
    for folder in ("dflash_local", "cli", "convert", "native", "tune/dflash_local_tune"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h"):
                read |= set(re.findall(r'"(DFLASH_LOCAL_[A-Z_]+)"', path.read_text()))
    assert read <= set(VARIABLES)
    told = run_here("--help").stdout
    assert all(name in told for name in VARIABLES)
    documented = (ROOT / "docs" / "install.md").read_text()
    assert all(name in documented for name in VARIABLES)
