"""The chat templates of many models, and calls that they write.

`chat_templates/llama_cpp.tar.xz` has the templates of llama.cpp's `models/templates`, as
llama-cpp-python 0.3.36 ships them, with llama.cpp's MIT licence.
"""

import tarfile
from pathlib import Path
from typing import Any

from dflash_local.chat.families import dialect_of
from dflash_local.chat.form import common_start
from dflash_local.chat.template import ChatTemplate
from dflash_local.chat.tool import Tool

with tarfile.open(Path(__file__).parent / "chat_templates" / "llama_cpp.tar.xz") as packed:
    TEMPLATES = {
        Path(member.name).stem: file.read().decode()
        for member in packed
        if member.name.endswith(".jinja") and (file := packed.extractfile(member))
    }

WITHOUT_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
"""They show no tools to the model, and write no calls."""
REFUSED = {
    # Each value's element has the key as its name, and lists and objects are elements, too.
    "MiniMax-M3",
    # A call begins without a mark, by the name alone.
    "meetkai-functionary-medium-v3.2",
    # The name comes twice.
    "muse-glimmer",
}
WRITE_NO_CALLS = {
    "LFM2-8B-A1B": '<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>',
    "LFM2.5-Instruct": '<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>',
    "ibm-granite-granite-3.3-2B-Instruct": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
    ),
}
"""They show tools, but leave calls of earlier answers out. Their models are told to write this."""

DESCRIBED = {"type": "string", "description": "Any."}
PROPERTIES: dict[str, Any] = {
    "city": DESCRIBED,
    "days": {"type": "integer", "description": "Any."},
    "share": {"type": "number", "description": "Any."},
    "exact": {"type": "boolean", "description": "Any."},
    "names": {"type": "array", "items": DESCRIBED, "description": "Any."},
    "box": {
        "type": "object",
        "properties": {"a": DESCRIBED},
        "additionalProperties": DESCRIBED,
        "description": "Any.",
    },
}
TOOLS = [
    Tool(name, "A tool.", {"type": "object", "properties": PROPERTIES, "required": ["city"]})
    for name in ("get_weather", "get_weather_now")
]
ROME = ("get_weather", {"city": "Rome"})
EVERYTHING = (
    "get_weather_now",
    {
        "city": 'New "York" <b>\n\tis \\ {x} [y], né',
        "days": 3,
        "share": -0.5,
        "exact": True,
        "names": ["x", "y"],
        "box": {"a": "z"},
    },
)
Calls = list[tuple[str, dict[str, Any]]]
ASKED = {"role": "user", "content": "Question?"}


def written(source: str, calls: Calls, content: str, reasoning: str) -> tuple[str, bool]:
    """The text of a template after its prompt, and whether that is inside of reasoning."""
    template = ChatTemplate(source, bos="", eos="")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message["tool_calls"] = [
        {"id": f"callAbc0{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    if reasoning:
        message["reasoning_content"] = reasoning
    prompt = template.render([ASKED], True, tools=TOOLS)
    whole = template.render([ASKED, message], False, tools=TOOLS)
    thinking = dialect_of(source).thinking
    is_open = thinking is not None and prompt.rstrip().endswith(thinking[0])
    text = whole[len(common_start(prompt, whole)) :]
    # Some templates leave out the reasoning that their prompt begins.
    is_open = is_open and whole.startswith(prompt) and thinking is not None and thinking[1] in text
    return text, is_open
