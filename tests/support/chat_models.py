"""The tiny target with the chat template of another family, and chats to render with it.

The templates in `chat_templates/` write what those of the families' models write.
"""

from pathlib import Path
from typing import Any

import gguf_files

FOLDER = Path(__file__).parent / "chat_templates"
FAMILIES = ("qwen3", "qwen3_coder", "llama31", "harmony")

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
"""A tool without arguments."""

HELLO = [{"role": "user", "content": "Hello"}]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [CALL, {**CALL, "id": "call_2"}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "windy"}]},
]
"""A conversation in which the model has reasoned and called a tool twice."""


def template(family: str) -> str:
    """The text of a family's chat template; `family` is one of FAMILIES."""
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")


def with_template(target: Path, path: Path, family: str) -> Path:
    """A copy of the target at `path` that has a family's chat template."""
    key = (template(family), gguf_files.STRING, None)
    return gguf_files.changed(target, path, keys={"tokenizer.chat_template": key})
