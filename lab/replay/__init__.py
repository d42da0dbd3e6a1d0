"""Replays: the target does all its work, and the text that comes out is given beforehand."""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parent / "texts" / "edits.jsonl"
"""Real edits of open code; the README beside it says from where."""
