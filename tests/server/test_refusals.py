"""Requests that each API refuses: in one line that names the field and says why."""

from typing import Any

import httpx
import pytest

from chat_models import NOW
from openai_api import CHAT, COMPLETIONS, user
from vision_models import asked, picture

Case = tuple[dict[str, Any], str | None, str]
"""What is added to a good request, the `param` that the error tells, and words of its message."""
MISSING = ...
"""In place of a field's value: it is left out."""


def each(field: str, *values: Any) -> list[Case]:
    """A case of each value, of which the message names the field, and no `param` is told."""
    return [({field: value}, None, field) for value in values]


def of_param(field: str, *values: Any) -> list[Case]:
    """The same where the error's `param` is the field, too."""
    return [(more, field, field) for more, *_ in each(field, *values)]


def of_entry(param: str, *more: dict[str, Any]) -> list[Case]:
    """Cases of which the message names the field, and `param` a place in it."""
    return [(each, param, next(iter(each))) for each in more]


OUT_OF_BOUNDS = [
    *of_param("max_tokens", 0, -2, 1.5, "5", True, 2**31, 10**30),
    *of_param("temperature", -0.1, 101, "1", "hot"),
    *of_param("top_p", 1.1, -1),
    *of_param("n", 0, 1000, True),
    *of_param("seed", 1.5, 10**30),
    *of_param("stop", 5, ["x"] * 1000),
    *of_entry("stop[0]", {"stop": [""]}, {"stop": ["x" * 100_000]}),
    *(*of_param("presence_penalty", 3), *of_param("frequency_penalty", -3)),
    *(*of_param("stream", "yes"), *of_param("logit_bias", [1])),
    *each("logit_bias", {"99999999": 1}),
    *of_entry("logit_bias.1", {"logit_bias": {"1": 1000}}),
    *of_entry("logit_bias.a", {"logit_bias": {"a": "b"}}),
    *of_entry("logit_bias." + "x" * 189, {"logit_bias": {"x" * 300: 1}}),  # cut to 200 characters
]
"""Of both of OpenAI's routes."""
BEGUN = {"role": "assistant", "content": "def add(a, "}
THOUGHT = {**BEGUN, "reasoning_content": "Hm."}
GOES_ON = "continue_final_message"
CONTRADICTIONS: list[Case] = [
    ({"messages": [*user("a"), BEGUN], "add_generation_prompt": True}, GOES_ON, "contradict"),
    ({"messages": user("a")}, GOES_ON, "last message of the assistant"),
    ({"messages": [BEGUN]}, GOES_ON, "after one of the user"),
]
REGEX = {"structured_outputs": {"regex": "a"}}
JSON = {"response_format": {"type": "json_object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
AT_AN_ADDRESS = {"type": "image", "source": {"type": "url", "url": "http://x"}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
EMPTY = {"input_prefix": "", "input_suffix": ""}
CHANCES = {"n_probs": 2, "post_sampling_probs": True, "temperature": 0.8}


def of_user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*user("a"), {"role": "user", "content": list(blocks)}]}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}, **more}


def schema(kind: str) -> dict[str, Any]:
    given = {"name": "x", "schema": {"type": kind}}
    return {"response_format": {"type": "json_schema", "json_schema": given}}


NO_URL = of_user({"type": "input_image", "image_url": 3})["messages"]
REFUSED: dict[str, tuple[dict[str, Any], list[Case]]] = {
    CHAT: (
        {"messages": user("hi")},
        [
            *OUT_OF_BOUNDS,
            *(({**case, GOES_ON: True}, param, words) for case, param, words in CONTRADICTIONS),
            ({"messages": []}, "messages", "at least 1"),
            ({"messages": "hi"}, "messages", "list"),
            ({"messages": None}, "messages", "list"),
            ({"messages": [{"role": 3, "content": "a"}]}, "messages[0].role", "string"),
            ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
            ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
            (of_user("hi"), "messages[1].content[0]", "dict"),
            (of_user({"type": "image_url"}), "messages[1].content[0].image_url", "required"),
            (of_user({"type": "input_audio"}), "messages[1].content[0]", "input_audio"),
            ({"messages": [asked("Hi", picture())]}, None, "image input is not supported"),
            ({"messages": [*user("a"), BEGUN], **JSON}, "messages", "free text"),
            ({"messages": [*user("a"), THOUGHT]}, "messages", "reasoning"),
            ({"messages": [*user("a"), BEGUN, BEGUN]}, "messages", "both of the assistant"),
            ({"max_completion_tokens": 1.5}, "max_completion_tokens", "integer"),
            *of_param("reasoning_budget_tokens", -2),
            ({"reasoning_format": "deepseek-legacy"}, "reasoning_format", "'deepseek'"),
            ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
            ({"logprobs": 3}, "logprobs", "boolean"),
            ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
            ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
            (
                {"response_format": {"type": "json_schema"}},
                "response_format.json_schema",
                "required",
            ),
            (schema("no such type"), None, "json_schema: Invalid type"),
            ({"grammar": "no grammar", "stream": True}, None, "grammar: Expected"),
            ({"functions": [{"name": "f"}]}, "functions", "tools"),
            ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
            ({"modalities": ["text", "audio"]}, "modalities", "text"),
            ({"tools": [function("f")], "tool_choice": "required"}, "tool_choice", "no tool calls"),
            ({"tools": [NOW], "tool_choice": function("no")}, "tool_choice", "'no'"),
            ({"tools": [NOW], "tool_choice": "always"}, "tool_choice", "required"),
            ({"tools": [NOW, NOW]}, "tools", "same name"),
            ({"tools": [function("a b")]}, "tools[0].function.name", "pattern"),
            ({"tools": [{"type": "custom"}]}, "tools[0]", "custom"),
            ({"tool_choice": "required"}, "tool_choice", "tools"),
            ({"chat_template_kwargs": {"messages": []}}, None, "messages"),
            ({"mirostat": 2}, "mirostat", "no such setting"),
            ({"min_tokens": -4}, "min_tokens", "0"),
            ({"stop_token_ids": ["3"]}, "stop_token_ids[0]", "integer"),
            ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
            ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "boolean"),
            ({"typical_p": 2.0}, "typical_p", "1"),
            ({"n_probs": 101}, "n_probs", "100"),
            ({"guided_choice": []}, "choice", "1"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "both"),
            (
                {"structured_outputs": {"structural_tag": {}}},
                "structured_outputs.structural_tag",
                "None",
            ),
            ({**REGEX, **JSON}, "structured_outputs", "give one"),
            ({"draft_detail": True}, "draft_detail", "set stream"),
            ({"draft_detail": 1, "stream": True}, "draft_detail", "boolean"),
            *of_param("draft_width", -1, 2.5, True, "wide"),
            ({"draft_width": 1000}, None, "at most 16"),
        ],
    ),
    "/apply-template": ({GOES_ON: True}, CONTRADICTIONS),
    COMPLETIONS: (
        {"prompt": "def f(n):"},
        [
            *OUT_OF_BOUNDS,
            ({"prompt": []}, "prompt", "at least 1"),
            ({"prompt": 3}, "prompt", "string"),
            ({"prompt": ["a", 3]}, "prompt[1]", "string"),
            ({"prompt": [1, "a"]}, "prompt[1]", "integer"),
            ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]", "integer"),
            ({"prompt": [-1]}, "prompt[0]", "greater"),
            ({"prompt": [10**6]}, None, "1000000"),
            ({"prompt": ""}, None, "empty"),
            ({"logprobs": 6}, "logprobs", "5"),
            ({"logprobs": True}, "logprobs", "integer"),
            ({"echo": True, "logprobs": 1, "stream": True}, "logprobs", "echo"),
            ({"min_tokens": 9, "max_tokens": 4}, None, "min_tokens is 9"),
            ({"min_tokens": 1, "structured_outputs": {"regex": "a"}}, None, "grammar"),
            ({"echo": True, "suffix": "a"}, "echo", "suffix"),
            ({"best_of": 3}, "best_of", "not ranked"),
            ({"n": 16, "prompt": ["a", "b", "c"]}, "n", "48 answers"),
        ],
    ),
    "/v1/responses": (
        {"input": "a"},
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
            ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
            ({"prompt": {"id": "pmpt_1"}}, "prompt", "nothing is stored"),
            ({"background": True}, "background", "no background answers"),
            ({"input": MISSING}, "input", "required"),
            ({"input": []}, "input", "at least 1"),
            ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
            (
                {"input": [{"type": "item_reference", "id": "msg_1"}]},
                "input[0]",
                "function_call_output",
            ),
            ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "'robot'"),
            ({"input": NO_URL}, "input[1].content[0].image_url", "object"),
            ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
            ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
            ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].hosted", "type mcp"),
            ({"tool_choice": "required"}, "tool_choice", "give tools"),
            ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ],
    ),
    "/v1/messages": (
        {"messages": user("Hi"), "max_tokens": 4},
        [
            *each("max_tokens", MISSING, 0, "5"),
            *each("messages", MISSING, []),
            ({"messages": [{"role": "robot", "content": "x"}]}, None, "user, assistant, system"),
            ({"messages": [{"role": "user", "content": 5}]}, None, "messages[0].content"),
            (of_user(IMAGE), None, "image input is not supported"),
            (of_user(AT_AN_ADDRESS), None, "nothing is fetched"),
            (of_user({"type": "document"}), None, "type document"),
            (of_user({"text": "x"}), None, "messages[1].content[0]"),
            (of_user({**RESULT, "content": [IMAGE]}), None, "image input is not supported"),
            ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, None, "type image"),
            ({"system": [IMAGE]}, None, "type image"),
            *(*each("temperature", -1), *each("top_p", 2), *each("top_k", 1.5)),
            *each("stop_sequences", "END", ["x"] * 1000),
            ({"tools": [{"name": "a b", "input_schema": {}}]}, None, "tools[0].name"),
            ({"tools": [{"name": "a"}]}, None, "tools[0].input_schema"),
            ({"tool_choice": {"type": "any"}}, None, "tools"),
            ({"tool_choice": {"type": "tool"}}, None, "name"),
            ({"tool_choice": {"type": "tool", "name": "a"}}, None, "tools"),
            *each("tool_choice", {"type": "some"}),
            *each("thinking", {"type": "perhaps"}),
            *(*each("output_config", {"effort": "most"}), *each("stream", "yes")),
        ],
    ),
    "/api/chat": (
        {"messages": user("x")},
        [
            ({"messages": [{"role": "user", "images": ["x"]}]}, None, "image input"),
            ({"messages": [{"role": "robot", "content": "x"}]}, None, "messages[0].role"),
            *(*each("format", "xml"), *each("think", "hard"), *each("logprobs", 1)),
            ({"options": {"num_predict": 0}}, None, "num_predict"),
            ({"options": {"top_p": 2}}, None, "options.top_p"),
            ({"options": {"stop": 5}}, None, "options.stop"),
            ({"tools": [{"function": {}}]}, None, "tools[0]"),
        ],
    ),
    "/api/generate": (
        {"prompt": "x"},
        [
            *(*each("template", "{{ .Prompt }}"), *each("context", [1, -2]), *each("prompt", 5)),
            ({"images": ["x"]}, None, "image input"),
        ],
    ),
    "/completion": (
        {"prompt": "a"},
        [
            *(*of_param("n_predict", -2, 1.5), *of_param("n_cmpl", 1000)),
            *(*of_param("temperature", "hot"), *of_param("top_n_sigma", "x")),
            *(
                *of_param("mirostat", 2),
                *of_param("min_keep", 5),
                *of_entry("stop[0]", {"stop": [""]}),
            ),
            *(*of_param("dry_multiplier", -0.8), *of_param("post_sampling_probs", "yes")),
            *of_param("prompt", None, [], [[1], 2], ["a"] * 17),
            ({"prompt": ""}, None, "empty"),
            ({"prompt": [10**6]}, None, "1000000"),
            ({"prompt": {"text": "a"}}, "prompt.constrained-str", "string"),
            ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, None, "<__media__>"),
            ({"grammar": "root = 'a'"}, None, "grammar: Expected"),
            ({"grammar": 'root ::= "a"', "json_schema": {}}, None, "at most one"),
            (
                {"logit_bias": [[token, "not looked at"] for token in range(2000)]},
                "logit_bias",
                "at most 1024",
            ),
            ({**CHANCES, "repeat_penalty": 1.5}, "post_sampling_probs", "penalties"),
            ({**CHANCES, "logit_bias": {"5": 1}}, "post_sampling_probs", "logit_bias"),
            ({**CHANCES, "grammar": 'root ::= "a"'}, "post_sampling_probs", "a grammar"),
            ({**CHANCES, "top_k": 0}, "post_sampling_probs", "top_k 0"),
            ({**CHANCES, "top_k": 1000}, "post_sampling_probs", "1 to 100"),
        ],
    ),
    "/infill": (
        EMPTY,
        [
            ({"input_prefix": MISSING}, "input_prefix", "required"),
            ({"input_suffix": MISSING}, "input_suffix", "required"),
            ({"prompt": ["a", -1]}, "prompt[1]", "string"),
            ({"input_extra": {}}, "input_extra", "list"),
            ({"input_extra": [{}]}, "input_extra[0].text", "required"),
            ({"input_extra": [{"text": 1}]}, "input_extra[0].text", "string"),
            ({"input_extra": [{"filename": 1, "text": ""}]}, "input_extra[0].filename", "string"),
            *(
                ({"input_prefix": given}, "input_prefix[0]", "string")
                for given in ([-1] * 200_000, [True], [[1]])
            ),
            ({"input_prefix": [10**6]}, None, "1000000"),
        ],
    ),
    "/tokenize": (
        {},
        [
            ({"content": {"a": 1}}, "content.constrained-str", "string"),
            ({"content": "a b " * 100_000, "with_pieces": True}, "with_pieces", "at most"),
            # llama.cpp takes up to a kilobyte for each of these.
            ({"content": " " * (4 << 20)}, "content", "in parts"),
            ({"content": [" " * (1 << 19)] * 3}, "content", "in parts"),
        ],
    ),
    "/detokenize": ({}, [({"tokens": [10**6]}, None, "1000000")]),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_refused_is_named(client: httpx.Client, path: str) -> None:
    base, cases = REFUSED[path]
    for more, param, words in cases:
        body = {name: value for name, value in (base | more).items() if value is not MISSING}
        answer = client.post(path, json=body)
        told = answer.json()
        assert answer.status_code == 400, (more, told)
        assert answer.headers["content-type"] == "application/json"
        error = {"message": told["error"]} if path.startswith("/api") else told["error"]
        assert words and words in error["message"], (more, error)
        assert "\n" not in error["message"] and len(error["message"]) < 400
        if not path.startswith("/api"):
            assert error["type"] == "invalid_request_error", (more, error)
        if not path.startswith(("/api", "/v1/messages")):
            assert set(told) == {"error"}
            assert set(error) == {"message", "type", "param", "code"}
        assert error.get("param") == param, (more, error)
