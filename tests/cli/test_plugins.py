"""The commands of dflash-local-tune: found by their entry points, and missed in one line."""

from importlib.metadata import distribution, entry_points, requires, version
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from command_line import run
from dflash_local.cli.main import group
from dflash_local.cli.plugins import GROUP
from dflash_local.cli.settings import template

INSTALL = "in a checkout pip install ./tune, else pip install 'dflash-local[tune]'"
NAMES = ["train", "tune"]


def metadata(folder: Path, entries: str = "", release: str = version("dflash-local")) -> Path:
    """A folder for PYTHONPATH. Of two distributions of one name Python takes the first, so this
    one hides the plugin that is installed."""
    info = folder / f"dflash_local_tune-{release}.dist-info"
    info.mkdir()
    told = f"Metadata-Version: 2.1\nName: dflash-local-tune\nVersion: {release}\n"
    (info / "METADATA").write_text(told)
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
    return folder


def answer(path: Path, *arguments: str, code: int = 2, **variables: str) -> tuple[str, str]:
    """stdout and stderr of the command, in a process whose imports begin in this folder."""
    done = run(*arguments, environment={"PYTHONPATH": str(path), **variables})
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, err
    assert "Traceback" not in err
    return out, err


def test_they_are_found_by_their_entry_points() -> None:
    found = entry_points(group=GROUP)
    assert sorted(found.names) == NAMES
    context = click.Context(group)
    for entry in found:
        _, command, rest = group.resolve_command(context, [entry.name, "-h"])
        assert command is entry.load() and rest == ["-h"]
        # The list of commands loads none: it has a copy of the sentence.
        (stated,) = (
            line.partition(entry.name)[2].strip()
            for line in run("-h").stdout.decode().splitlines()
            if line.startswith(f"  {entry.name} ")
        )
        assert stated == command.get_short_help_str(1000)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("more", ["", "-h", "qwen3-8b --undo", "m.gguf -o out --minutes 3"])
def test_where_they_are_not_installed_one_line_says_what_to_install(
    name: str, more: str, tmp_path: Path
) -> None:
    told = f"dflash-local: error: {name} is not installed: {INSTALL}\n"
    assert answer(metadata(tmp_path), name, *more.split()) == ("", told)


def test_all_else_works_where_they_are_not_installed(tmp_path: Path) -> None:
    path = metadata(tmp_path)
    here = answer(path, "-h", code=0)
    assert here == (run("-h").stdout.decode(), "")
    assert all(f"\n  {name} " in here[0] for name in NAMES)
    settings = tmp_path / "config.toml"
    settings.write_text("ctx = 512\n[tune]\nminutes = 3\n")
    out, err = answer(path, "list", "--json", code=0, DFLASH_LOCAL_CONFIG=str(settings))
    assert out.startswith('{"models": ') and err == ""
    asked = {"COMP_WORDS": "dflash-local t", "COMP_CWORD": "1"}
    out, err = answer(path, code=0, _DFLASH_LOCAL_COMPLETE="bash_complete", **asked)
    assert (out.split(), err) == ([f"plain,{name}" for name in NAMES], "")


def test_what_may_be_of_them_is_told_so_where_they_are_not_installed(tmp_path: Path) -> None:
    path, settings = metadata(tmp_path), tmp_path / "config.toml"
    settings.write_text("minutes = 3\n")
    asked = {"DFLASH_LOCAL_CONFIG": str(settings)}
    _, err = answer(path, "list", **asked)
    other = "if it is of train and tune, which cannot be loaded here"
    assert "minutes is no setting; " in err and f"{other}, put it in a table" in err
    _, err = answer(path, "list", code=0, DFLASH_LOCAL_MINUTES="3")
    told = f"DFLASH_LOCAL_MINUTES means nothing to this program; {other}, it waits for them"
    assert told in err.replace("\n", " ")
    # With them no key of theirs alone is offered for all commands.
    general = template(group).partition("\n# [")[0]
    assert "# ctx = " in general and "# minutes = " not in general


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tune = 1", "module 'broken' has no attribute 'gone'"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise OSError('first line\\nsecond line')", "first line; install it again: "),
        ("raise ValueError", "ValueError"),
        ("tune = (", "'(' was never closed"),
        ("gone = 1", "broken:gone is no command"),
    ],
)
def test_a_damaged_one_is_told_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"{text}\n")
    out, err = answer(metadata(tmp_path, "tune = broken:gone"), "tune", "qwen3-8b")
    assert out == "" and err.count("\n") == 1
    assert err.startswith("dflash-local: error: tune cannot be loaded: ")
    assert expected in err
    assert err.endswith(": pip install --force-reinstall --no-deps dflash-local-tune\n")


def test_damaged_metadata_are_told_in_one_line(tmp_path: Path) -> None:
    _, err = answer(metadata(tmp_path, "no entry point"), "tune", "qwen3-8b")
    assert err.startswith("dflash-local: error: tune cannot be loaded: ") and err.count("\n") == 1


def test_one_of_another_version_is_refused(tmp_path: Path) -> None:
    command = "dflash_local_tune.commands.tune:tune"
    _, err = answer(metadata(tmp_path, f"tune = {command}", "0.0.9"), "tune", "-h")
    mine = version("dflash-local")
    told = f"is that of dflash-local-tune 0.0.9, which does not fit dflash-local {mine}: {INSTALL}"
    assert err == f"dflash-local: error: tune {told}\n"


def test_pip_installs_the_two_in_one_version_only() -> None:
    mine = version("dflash-local")
    assert distribution("dflash-local-tune").version == mine
    needs = {each.name: each for each in map(Requirement, requires("dflash-local-tune") or ())}
    assert str(needs["dflash-local"].specifier) == f"=={mine}"
    asked = map(Requirement, requires("dflash-local") or ())
    extra = [each for each in asked if each.marker and each.marker.evaluate({"extra": "tune"})]
    added = [each for each in extra if not (each.marker and each.marker.evaluate({"extra": ""}))]
    assert [f"{each.name}{each.specifier}" for each in added] == [f"dflash-local-tune=={mine}"]
