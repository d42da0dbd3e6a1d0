"""The page of published drafters is the registry's, and says of targets what the code does."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dflash_local.fit.architectures import (
    OWN_STATE_ARCHITECTURES,
    RECURRENT_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
)
from dflash_local.pairs.registry import own_entries

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "drafters.md"


@pytest.fixture(scope="module")
def tool() -> Any:
    """tools/write_drafters_page.py, which is no package."""
    spec = importlib.util.spec_from_file_location(
        "write_drafters_page", ROOT / "tools" / "write_drafters_page.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows() -> list[list[str]]:
    cells = [line.strip("|").split("|") for line in PAGE.read_text("utf-8").splitlines()]
    trimmed = [[cell.strip() for cell in row] for row in cells]
    return [row for row in trimmed if len(row) == 6 and row[0].startswith("`")]


def test_the_page_is_the_registrys(tool: Any) -> None:
    text = PAGE.read_text("utf-8")
    assert tool.page(text, own_entries()) == text, "run python3 tools/write_drafters_page.py"


def test_every_drafter_stands_there_once() -> None:
    drafters = [row[1].strip("`") for row in rows()]
    assert len(drafters) > 20 and len(set(drafters)) == len(drafters)
    drafters_here = {Path(entry.drafter).name for entry in own_entries()}
    assert {Path(name).name for name in drafters} == drafters_here


def test_it_says_for_which_targets_drafts_are_made() -> None:
    for name, _, _, architecture, told, _ in rows():
        known = architecture.strip("`")
        if known in OWN_STATE_ARCHITECTURES:
            expected = "no: recurrent"
        elif known not in TAPPED_ARCHITECTURES:
            expected = "no: no taps"
        else:
            expected = "chains" if known in RECURRENT_ARCHITECTURES else "yes"
        assert told == expected, name
