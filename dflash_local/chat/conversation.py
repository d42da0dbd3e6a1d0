"""Checks messages as clients send them, and gives them the shape that chat templates expect."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from dflash_local.errors import InputError

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that clients give to the reasoning of an earlier answer."""

_CALLS_WITHOUT_CONTENT = re.compile(r"\['content'\] is none -?%}")
"""Of a template that shows calls only where the content is null, as DeepSeek R1's first ones."""


def conversation(messages: object, source: str) -> list[dict[str, Any]]:
    """The messages as a template with the text `source` is given them.

    - Content that comes in text parts becomes one text, with a line break between parts. A message
      with tool calls and no content gets an empty text.
    - Arguments of tool calls become objects; null fields are left out, and what was cut off.
    - The role `developer` becomes `system` if the template does not know it.
    - The reasoning of earlier answers gets the name that the template uses, or is left out if the
      template uses none.
    - A tool's answer gets the tool's `name`, found by its `tool_call_id`.
    - If the template reads only the first call of a message, a message with several calls becomes
      several messages, each followed by its answer.
    - If the template reads the answers of tools in the message that calls them, as Gemma 4's first
      one, they and the text that follows are put there.

    Raises InputError for messages of another shape.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InputError(
            f"messages are {_kind(messages)}; give a list of at least one message, each "
            '{"role": ..., "content": ...}'
        )
    checked = [_message(index, message, source) for index, message in enumerate(messages)]
    _name_tools(checked)
    if "['tool_responses']" in source and "!= 'tool'" not in source:
        return _answers_beside_calls(checked)
    return _one_call_each(checked) if "tool_calls[0]" in source else checked


def _message(index: int, message: object, source: str) -> dict[str, Any]:
    where = f"message {index}"
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is {_kind(message)}; give an object with role and content")
    role = _text(where, message, "role")
    shown = {
        key: value
        for key, value in message.items()
        if value is not None and key not in ("content", "tool_calls", *_REASONING)
    }
    if role == "developer" and "developer" not in source:
        shown["role"] = "system"
    calls = _calls(where, message.get("tool_calls"))
    told = (_text(where, message, key) for key in _REASONING if message.get(key) is not None)
    reasoning = next(filter(None, told), "")
    content = _content(where, message, is_optional=bool(calls or reasoning))
    shown["content"] = content
    if reasoning and "block['thinking']" in source:  # Ministral's
        parts = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": content}]
        shown["content"] = parts if content else parts[:1]
    elif reasoning and "reasoning_content" in source:
        shown["reasoning_content"] = reasoning
    elif reasoning and "thinking" in source:
        shown["thinking"] = reasoning
        if calls and content:
            # gpt-oss's template takes only one of the two there, and shows it as reasoning.
            shown |= {"thinking": f"{reasoning}\n\n{content}", "content": ""}
    if calls:
        shown["tool_calls"] = calls
        if not shown["content"] and _CALLS_WITHOUT_CONTENT.search(source):
            shown["content"] = None
    return shown


def _content(where: str, message: Mapping[str, Any], *, is_optional: bool) -> str:
    content = message.get("content")
    if content is None and is_optional:
        return ""
    if isinstance(content, Sequence) and content and not isinstance(content, str):
        return "\n".join(_part(f"{where}: part {i}", part) for i, part in enumerate(content))
    return _text(where, message, "content")


def _part(where: str, part: object) -> str:
    if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
        raise InputError(
            f'{where} is not an object with a type; give {{"type": "text", "text": ...}}'
        )
    if kind in ("text", "refusal"):  # the text of an earlier answer
        return _text(where, part, kind)
    raise InputError(
        f"{where} is of type {kind!r}, but this model reads only text; give parts "
        '{"type": "text", "text": ...}'
    )


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InputError(f"{where}: tool_calls are {_kind(calls)}; give a list of calls")
    return [_call(f"{where}: tool call {index}", call) for index, call in enumerate(calls)]


def _call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not name:
        raise InputError(
            f'{where} names no function; give {{"id": ..., "type": "function", "function": '
            '{"name": ..., "arguments": ...}}'
        )
    if not isinstance(name, str):
        raise InputError(f"{where}: the function's name is {_kind(name)}; give a text")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        text = arguments or "{}"
        arguments = _parsed(text)
        if arguments is text:  # no JSON: a call that `max_tokens` has cut off, sent back
            arguments = complete_fields(text)
    if not isinstance(arguments, Mapping):
        raise InputError(
            f"{where}: arguments are {_kind(arguments)}; give the text of a JSON object"
        )
    return {"type": "function", **call, "function": {**function, "arguments": dict(arguments)}}


def complete_fields(text: str) -> dict[str, Any]:
    """The fields of a JSON object; of one that was cut off those that are complete."""
    try:
        found = from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _name_tools(messages: list[dict[str, Any]]) -> None:
    names = {
        call.get("id"): call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
        if isinstance(call.get("id"), str)
    }
    for message in messages:
        called = message.get("tool_call_id")
        if message["role"] == "tool" and isinstance(called, str) and called in names:
            message.setdefault("name", names[called])


_Turn = tuple[dict[str, Any], list[dict[str, Any]]]


def _turns(messages: list[dict[str, Any]]) -> list[_Turn]:
    """Each message with the answers of tools behind it."""
    turns: list[_Turn] = []
    for message in messages:
        if turns and message["role"] == "tool":
            turns[-1][1].append(message)
        else:
            turns.append((message, []))
    return turns


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with one call each, every call followed by its answer."""
    apart: list[dict[str, Any]] = []
    for message, answers in _turns(messages):
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            apart += [message, *answers]
            continue
        for n, call in enumerate(calls):
            # Content and reasoning belong to the first call.
            said = message if n == 0 else {"role": message["role"], "content": ""}
            mine = [a for a in answers if call.get("id") and a.get("tool_call_id") == call["id"]]
            apart += [{**said, "tool_calls": [call]}, *mine]
            answers = [answer for answer in answers if answer not in mine]
        apart += answers
    return apart


def _answers_beside_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the answers of tools as `tool_responses` of the message before them, and
    with the text that follows as its content."""
    joined: list[dict[str, Any]] = []
    called: dict[str, Any] | None = None  # the last message, if the next text belongs to it
    for message, answers in _turns(messages):
        if message.get("tool_calls"):
            if message["content"]:  # the template would write it after the answers
                joined.append({"role": message["role"], "content": message["content"]})
            responses = [
                {"name": answer.get("name", ""), "response": _parsed(answer["content"])}
                for answer in answers
            ]
            joined.append({**message, "content": "", "tool_responses": responses})
            called = joined[-1] if answers else None
        elif called and message["role"] == "assistant":
            called["content"], called = message["content"], None
            joined += answers
        else:
            joined += [message, *answers]
            called = None
    return joined


def _parsed(text: str) -> Any:
    """The value of JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(where: str, given: Mapping[str, Any], key: str) -> str:
    text = given.get(key)
    if not isinstance(text, str):
        found = _kind(text) if key in given else "missing"
        raise InputError(f"{where}: {key} is {found}; give a text")
    return text


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)) and not value:
        return "empty"
    return f"of type {type(value).__name__}"
