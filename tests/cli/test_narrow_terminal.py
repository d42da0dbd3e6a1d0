"""The output of commands keeps within a narrow terminal, with whole words."""

import os
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from narrow_terminal import lines_on


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Of someone with an empty home, so that no path on this machine is in the texts."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    return {**kept, "TERM": "xterm-256color", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("columns", [40, 80])
def test_the_list_of_commands_is_whole(columns: int, variables: dict[str, str]) -> None:
    lines = lines_on(columns, "-h", variables=variables)
    whole = "_DFLASH_LOCAL_COMPLETE"  # in lines that are to be copied
    assert not [line for line in lines if len(line) > columns and whole not in line]
    commands = lines[lines.index("Commands:") :]
    commands = commands[: commands.index("")]
    assert any("serve      Answer editors" in line for line in commands)
    assert "..." not in "".join(commands)


def test_an_error_fits(variables: dict[str, str]) -> None:
    lines = lines_on(40, "rm", "qwen3-9b", variables=variables)
    assert len(lines) > 2 and max(map(len, lines)) <= 40


@pytest.mark.slow
def test_a_list_has_no_column_that_the_names_tell(variables: dict[str, str]) -> None:
    lines = lines_on(60, "list", variables=variables)
    assert ["name", "size", "here", "fits"] in [line.split() for line in lines]
    assert len(lines) > 30
    assert max(map(len, lines)) <= 60


def test_models_without_room_for_a_table_have_two_lines_each(variables: dict[str, str]) -> None:
    lines = lines_on(40, "list", variables=variables)
    at = lines.index("qwen3-8b")
    assert lines[at + 1].startswith("  ~") and "GB, not here, on the CPU" in lines[at + 1]
    assert max(map(len, lines)) <= 40
