"""What commands show keeps within a narrow terminal, with whole words."""

from __future__ import annotations

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


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize(
    "asked",
    [("-h",), ("list",), ("rm", "qwen3-9b"), ("ps", "--url", "http://127.0.0.1:9")],
    ids=lambda asked: asked[0],
)
def test_lines_fit(asked: tuple[str, ...], columns: int, variables: dict[str, str]) -> None:
    lines = lines_on(columns, *asked, variables=variables)
    assert len(lines) > 2
    whole = "_DFLASH_LOCAL_COMPLETE"  # in lines that are to be copied
    assert not [line for line in lines if len(line) > columns and whole not in line]


def test_models_without_room_for_a_table_have_two_lines_each(variables: dict[str, str]) -> None:
    lines = lines_on(40, "list", variables=variables)
    at = lines.index("qwen3-8b")
    assert lines[at + 1].startswith("  ~") and "GB, not here, on the CPU" in lines[at + 1]
