"""The tests' own pair: a tiny trained target and its drafter (tests/tiny_coder/README.md)."""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tiny_coder"


def pair() -> tuple[Path, Path]:
    """Paths of the target and of the drafter, both GGUF in Q8_0."""
    return FOLDER / "tiny-coder-q8_0.gguf", FOLDER / "tiny-coder-dflash-b16-q8_0.gguf"


def prompts() -> dict[str, list[str]]:
    """Prompts by kind, `chat` and `code`, as text with the target's special tokens in place."""
    loaded: dict[str, list[str]] = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    return loaded
