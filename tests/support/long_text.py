"""A long Python text for prompts, which edits of the project's own sources do not change."""

from pathlib import Path

PYTHON_SOURCE = (Path(__file__).with_name("texts") / "python_source.txt").read_text("utf-8")
