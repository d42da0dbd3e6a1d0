"""Event streams, byte by byte, as files in `golden/` have them.

Parts that differ by run are replaced first: ids by `<id>`, times by `<time>`, the fingerprint by
`<fingerprint>`, durations, and every number in `timings` and of a log-probability, by `<number>`;
comments and pings that keep a connection alive are left out. Texts are those of a target that
decodes plainly, where it is certain or bound, so that they do not hang on the last bit of a sum.

After a change that is meant, write the files anew with DFLASH_LOCAL_GOLDEN=write in the
environment, and read the difference.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chat_models import NOW
from openai_api import CHAT, COMPLETIONS, QUESTION, user
from tool_server import serving_tools

GOLDEN = Path(__file__).parent / "golden"

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"const": "Rome"}, "days": {"const": 3}},
    "required": ["to", "days"],
    "additionalProperties": False,
}
PLACE = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
COUNT = "a = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
# The likeliest token, but drawn: what is greedy takes several steps at once where time allows.
STREAM = {"temperature": 0, "stream": True}
TURN = (
    "<think>\nOh\n</think>\n\nOff!\n"
    '<tool_call>\n{"name": "go", "arguments": {"to": "Rome", "days": 3}}\n</tool_call>'
)
"""The parts of an answer of Qwen3."""
ASKED, GO = {"messages": user(QUESTION)}, {"messages": user("Go")}
USAGE = {"stream_options": {"include_usage": True}}
BOUND = {"grammar": f"root ::= {json.dumps(TURN)}"}
THOUGHT = {"grammar": r'root ::= "<think>\nOh\n</think>\n\n2"'}
CALL = {"tool_choice": {"type": "function", "function": {"name": "go"}}}
WORD = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"const": "two"}}}
TOOL = {"name": "go", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", **PLACE["function"]}
THINKING = {"thinking": {"type": "adaptive"}, "max_tokens": 100}
FIXED = {"top_k": 1, "seed": 0, "cache_prompt": False}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**ASKED, "max_tokens": 4}),
    "chat_stop": (CHAT, {**ASKED, "stop": "\n", **USAGE}),
    "chat_logprobs": (CHAT, {**ASKED, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}),
    "chat_reasoning": (CHAT, {"messages": user("1?"), **THOUGHT, **USAGE}),
    "chat_tools": (
        CHAT,
        {**GO, "tools": [PLACE, NOW], **CALL, "parallel_tool_calls": False, **USAGE},
    ),
    "chat_json": (CHAT, {**GO, "reasoning_effort": "none", "response_format": WORD}),
    "completions": (COMPLETIONS, {"prompt": COUNT, "max_tokens": 3, "echo": True}),
    "completions_logprobs": (
        COMPLETIONS,
        {"prompt": COUNT, "max_tokens": 2, "logprobs": 1, **USAGE},
    ),
    "messages": ("/v1/messages", {**GO, **THINKING, "tools": [TOOL], **BOUND}),
    "responses": ("/v1/responses", {"input": QUESTION, "max_output_tokens": 4}),
    "responses_parts": ("/v1/responses", {"input": "Go", "tools": [RESPONSES_TOOL], **BOUND}),
    "ollama_chat": ("/api/chat", {**GO, "tools": [PLACE], "options": {**FIXED, **BOUND}}),
}
PING = 'event: ping\ndata: {"type":"ping"}\n\n'
_REPLACED = (
    (re.compile(r'(?<=id":")(chatcmpl|cmpl|call|msg|resp|rs|fc)[-_][0-9a-f]{24,}'), "<id>"),
    (re.compile(r'"(created|created_at|completed_at)":[0-9]+'), r'"\1":<time>'),
    (re.compile(r'"created_at":"[^"]*"'), '"created_at":"<time>"'),
    (re.compile(r'(?<=_duration":)[0-9]+'), "<number>"),
    (
        re.compile(r'"system_fingerprint":"b[^"]+-[0-9a-f]{12}"'),
        '"system_fingerprint":"<fingerprint>"',
    ),
    (re.compile(r"(?<=[:\[,])-?[0-9]+(\.[0-9]+)?(e-[0-9]+)(?=[,}\]])"), "<number>"),
    (re.compile(r"(?<=[:\[,])-?[0-9]+\.[0-9]+(?=[,}\]])"), "<number>"),
)
_TIMINGS = re.compile(r'"timings":\{[^}]*\}')


def replaced(text: str) -> str:
    text = text.replace(": \n\n", "").replace(PING, "")
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    return _TIMINGS.sub(lambda found: re.sub(r"(?<=:)[0-9]+", "<number>", found[0]), text)


@pytest.fixture(scope="module")
def certain(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a trained model."""
    with serving_tools(pair, tmp_path_factory.mktemp("tools")) as server, server.client() as client:
        yield client


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_is_what_the_file_has(certain: httpx.Client, name: str) -> None:
    path, body = REQUESTS[name]
    # A cached prompt would change the usage from the second run on.
    answer = certain.post(path, json={**STREAM, "cache_prompt": False, **body})
    assert answer.status_code == 200, answer.text
    told = replaced(answer.text)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("DFLASH_LOCAL_GOLDEN") == "write":
        golden.write_text(told, encoding="utf-8", newline="\n")
    assert told.encode() == golden.read_bytes()
