"""Tools in OpenAI's shape."""

import pytest

import chat_models
from dflash_local.chat.tool import Tool
from dflash_local.errors import InputError


@pytest.mark.parametrize(
    ("tool", "part"),
    [
        ({"type": "web_search"}, "not a function"),
        ({"type": "function", "function": {}}, "not a function with a name"),
        ({"type": "function", "function": {"name": "a b"}}, "'a b'"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "JSON schema"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
            "object",
        ),
        ({"type": "function", "function": {"name": "f", "description": 3}}, "description"),
        ("f", "not a function"),
    ],
)
def test_tools_of_another_shape_are_refused(tool: dict[str, object], part: str) -> None:
    with pytest.raises(InputError, match=part):
        Tool.of(tool)


def test_a_tool_keeps_its_shape() -> None:
    assert Tool.of(chat_models.WEATHER).shown() == chat_models.WEATHER
    assert Tool.of(chat_models.NOW).parameters["properties"] == {}
