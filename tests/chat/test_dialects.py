"""Answers of the model families become content, reasoning and tool calls, however they arrive."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chat_models
from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    call_id,
    joined,
)
from dflash_local.chat.families import dialect_of
from dflash_local.chat.form import THINK
from dflash_local.chat.harmony import Harmony
from dflash_local.chat.tool import Tool
from model_templates import TEMPLATES

HERMES = dialect_of(chat_models.template("qwen3"))
CODER = dialect_of(chat_models.template("qwen3_coder"))
LLAMA = dialect_of(chat_models.template("llama31"))
LFM = dialect_of(TEMPLATES["LFM2.5-8B-A1B"])
THINKING_CODER = replace(CODER, thinking=THINK)
PLAIN = Dialect()

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "box": {"$ref": "#/$defs/box"},
    },
    "$defs": {"box": {"type": "object"}},
}
TOOLS = [Tool("get_weather", None, SCHEMA), Tool("now")]

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def read(dialect: Dialect, pieces: list[str], *, thinking_open: bool = False) -> list[Event]:
    parser = dialect.parser(TOOLS, thinking_open=thinking_open)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return numbered(joined(events + parser.feed("", is_last=True)))


def numbered(events: list[Event]) -> list[Event]:
    """With the calls' places for their ids, which are new each time."""
    return [replace(e, id=f"id{e.index}") if isinstance(e, ToolCallStart) else e for e in events]


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [ToolCallStart(index, f"id{index}", name), ToolCallArguments(index, arguments)]


def coder(*parameters: str, name: str = "get_weather") -> str:
    inner = "".join(f"<parameter={p}\n</parameter>\n" for p in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


PARIS = '{"city": "Paris"}'
ANSWERS: list[tuple[Dialect, str, list[Event]]] = [
    # Qwen3
    (HERMES, "Hello\n", [Content("Hello\n")]),
    (HERMES, f"Sure.\n{WEATHER}", [Content("Sure."), *call(0, "get_weather", PARIS)]),
    (
        HERMES,
        f"<think>\nHm, <tool_call>.\n</think>\n\n{WEATHER}\n{NOW}\n",
        [Reasoning("Hm, <tool_call>."), *call(0, "get_weather", PARIS), *call(1, "now", "{}")],
    ),
    (HERMES, "<think>\n\n</think>\n\nYes", [Content("Yes")]),
    (HERMES, "<think>no end", [Reasoning("no end")]),
    (HERMES, "I <think> so </think>", [Content("I <think> so </think>")]),
    (
        HERMES,
        '<tool_call>{"id": 1, "arguments": {"a": [1, {}]}, "name": "now"}</tool_call>',
        call(0, "now", '{"a": [1, {}]}'),
    ),
    (HERMES, '<tool_call>{"name": "now"}', call(0, "now", "{}")),
    # Llama 3.1
    (LLAMA, f'{{"name": "get_weather", "parameters": {PARIS}}}', call(0, "get_weather", PARIS)),
    (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "now", "parameters": {}}',
        [*call(0, "now", "{}"), *call(1, "now", "{}")],
    ),
    (
        LLAMA,
        '<|python_tag|>get_weather.call(city="a) b", days=2)',
        call(0, "get_weather", '{"city": "a) b", "days": 2}'),
    ),
    (LLAMA, '{"name": "now", "parameters": {}, "more": [1]}', call(0, "now", "{}")),
    # Qwen3-Coder
    (
        CODER,
        "Look:\n" + coder('city>\nNew "York"\n', "days>\n3", "exact>\nTrue", "note>\nnull"),
        [
            Content("Look:"),
            *call(
                0,
                "get_weather",
                '{"city": "New \\"York\\"\\n", "days": 3, "exact": true, "note": null}',
            ),
        ],
    ),
    (
        CODER,
        coder('box>\n{"a": [1]}', "other>\n5", "days>\nsoon") + "\n" + CODER_NOW,
        [
            *call(0, "get_weather", '{"box": {"a": [1]}, "other": "5", "days": "soon"}'),
            *call(1, "now", "{}"),
        ],
    ),
    (CODER, "<function=now>\n</function>\n</tool_call>", call(0, "now", "{}")),
    (
        CODER,
        coder("city>\nsee </parameter> and </p</parameter>\n!"),
        call(0, "get_weather", '{"city": "see </parameter> and </p</parameter>\\n!"}'),
    ),
    # gpt-oss
    (
        Harmony(),
        THOUGHT + "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{PARIS}<|call|>",
        [Reasoning("Hm."), *call(0, "get_weather", PARIS)],
    ),
    (Harmony(), " to=functions.now<|channel|>commentary json<|message|>{}", call(0, "now", "{}")),
    (
        Harmony(),
        ' to=functions.now<|message|> {"a": "<|end|>"} <|call|>',
        call(0, "now", '{"a": "<|end|>"}'),
    ),
    (
        Harmony(),
        THOUGHT + "<|channel|>final<|message|>Yes, <|this|> \n",
        [Reasoning("Hm."), Content("Yes, <|this|> \n")],
    ),
    (Harmony(), "<|channel|>commentary<|message|>Let me look.", [Content("Let me look.")]),
    (Harmony(), "No channel at all.", [Content("No channel at all.")]),
    # without tools
    (PLAIN, WEATHER, [Content(WEATHER)]),
    (Dialect(thinking=THINK), "<think>a</think>\nb", [Reasoning("a"), Content("b")]),
]


@pytest.mark.parametrize(("dialect", "text", "events"), ANSWERS)
def test_an_answer_is_taken_apart(dialect: Dialect, text: str, events: list[Event]) -> None:
    assert read(dialect, [text]) == events


LOOKS_LIKE_A_CALL = [
    (HERMES, WEATHER.replace("get_weather", "get_wether")),
    (HERMES, WEATHER.replace("{", "[", 1)),
    (HERMES, WEATHER.replace(": {", ": [")),
    (HERMES, '<tool_call>{"name": "now", "argum'),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    (HERMES, f"So:\n```xml\n{WEATHER}\n```\n"),
    (HERMES, f"~~~\n{WEATHER}\n```\n{NOW}"),
    (HERMES, f"Write `{WEATHER}`."),
    (HERMES, "<tool_call> is a mark. So is </tool_call>."),
    (HERMES, "a <tool_cal"),
    (HERMES, " \n<thin"),
    (CODER, CODER_NOW.replace("now", "nowhere")),
    (CODER, "<function=now> begins a call"),
    (CODER, f"```\n{CODER_NOW}\n```"),
    (CODER, "<tool_call>\n<function=get_weather>\n<parameter=ci"),
    (LLAMA, '{"name": "now", "parameters": {}'[:-4]),
    (LLAMA, '{"name": "now"}'),
    (LLAMA, '{"name": "Ada", "parameters": {}}'),
    (LLAMA, '{"answer": {"name": "now", "parameters": {}}}'),
    (LLAMA, 'Call {"name": "now", "parameters": {}}'),
    (LLAMA, "<|python_tag|>print(1)"),
    (LLAMA, "<|python_tag|>now.call(1)"),
    (LLAMA, "  "),
    (Harmony(), "to=functions.now"),
]


@pytest.mark.parametrize(("dialect", "text"), LOOKS_LIKE_A_CALL)
def test_what_only_looks_like_a_call_stays_text(dialect: Dialect, text: str) -> None:
    assert read(dialect, [text]) == [Content(text)]


def test_a_call_behind_what_only_looked_like_one_is_found() -> None:
    false = '<tool_call>{"name": "nowhere", "arguments": {}}</tool_call>'
    assert read(HERMES, [f"<tool_call> {false} {NOW}"]) == [
        Content(f"<tool_call> {false}"),
        *call(0, "now", "{}"),
    ]


def test_calls_right_behind_other_calls_are_found() -> None:
    text = "<|tool_call_start|>[now()]<|tool_call_end|>"
    both = [*call(0, "now", "{}"), *call(1, "now", "{}")]
    assert read(LFM, [text + text]) == read(LFM, [text, " \n", text]) == both


def test_blanks_wait_for_what_follows_them() -> None:
    for dialect in (HERMES, LLAMA, Harmony(), LFM):
        blanks = list(" \n" * 5000)
        for end in ("x", ""):
            assert read(dialect, [*blanks, end]) == [Content("".join(blanks) + end)]


def test_a_call_behind_a_code_block_is_found() -> None:
    text = f"```\n{NOW}\n```"
    assert read(HERMES, [f"{text}\n{NOW}"]) == [Content(text), *call(0, "now", "{}")]


BROKEN = [
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1,, "b"', '{"a": 1,', ', "b"'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "cut', '{"a": "cut', ""),
    (LLAMA, '{"name": "now", "parameters": {"a": 01}}', '{"a": 0', "1}}"),
    (CODER, "<function=get_weather><parameter=city>\nPar", '{"city": "Par', ""),
    (CODER, coder("city>\nParis").replace("nction>", ""), '{"city": "Paris', ""),
    (CODER, coder("city>\nx").replace("</function>", "<!>"), '{"city": "x', ""),
    (Harmony(), ' to=functions.now<|message|>{"a" 1}<|end|>', '{"a" ', "1}"),
]


@pytest.mark.parametrize(("dialect", "text", "arguments", "rest"), BROKEN)
def test_arguments_that_break_off_are_no_json(
    dialect: Dialect, text: str, arguments: str, rest: str
) -> None:
    events = read(dialect, [text])
    begun = events[1]
    assert isinstance(begun, ToolCallArguments) and begun.text.startswith(arguments)
    with pytest.raises(ValueError):
        json.loads(begun.text)
    assert events[2:] == ([Content(rest)] if rest else [])


ALL = [(d, t) for d, t, _ in ANSWERS] + LOOKS_LIKE_A_CALL + [(d, t) for d, t, *_ in BROKEN]


@given(st.sampled_from(ALL), st.data())
def test_pieces_join_to_the_same(case: tuple[Dialect, str], data: st.DataObject) -> None:
    dialect, text = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    ends = [*cuts, len(text)]
    pieces = [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    assert read(dialect, pieces) == read(dialect, [text])


OTHERS = [
    dialect_of(TEMPLATES[name])
    for name in ("GLM-4.7-Flash", "LFM2.5-8B-A1B", "google-gemma-4-31B-it", "Kimi-K3")
]
MARKS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now"', ", ", "}", "```"),
    *('"arguments": {', '"parameters": {', "\n", " ", ";", "x", '"', "\\", "<", "`", "1"),
    *("<function=now>", "<function=get_weather>", "</function>", "<parameter=city>"),
    *("</parameter>", "<|python_tag|>", "now.call(", ")", "<|channel|>", "final", "analysis"),
    *("<|message|>", "<|end|>", "<|start|>", " to=functions.now"),
    *("<arg_key>", "city", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "call:"),
    *("now", "{", "[", "]", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "(", "city='", "'"),
]


@given(
    st.sampled_from([HERMES, THINKING_CODER, LLAMA, Harmony(), *OTHERS]),
    st.lists(st.sampled_from(MARKS)),
)
def test_any_mixture_of_marks_is_read_the_same_in_pieces(
    dialect: Dialect, marks: list[str]
) -> None:
    text = "".join(marks)
    whole = read(dialect, [text])
    assert read(dialect, list(text)) == whole
    assert read(dialect, marks) == whole
    finished = {event.index for event in whole if isinstance(event, ToolCallStart)}
    assert finished == set(range(len(finished)))


TEXT = st.text(max_size=8)


@settings(max_examples=25)
@given(st.dictionaries(TEXT, st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
), max_size=4))  # fmt: skip
def test_arguments_arrive_as_they_were_written(arguments: dict[str, object]) -> None:
    text = json.dumps(arguments)
    for dialect, answer in (
        (HERMES, f'<tool_call>\n{{"name": "now", "arguments": {text}}}\n</tool_call>'),
        (LLAMA, f'{{"name": "now", "parameters": {text}}}'),
        (Harmony(), f" to=functions.now<|channel|>commentary json<|message|>{text}"),
    ):
        assert read(dialect, list(answer)) == call(0, "now", text)


@given(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_texts_of_the_markup_are_escaped(city: str) -> None:
    _, arguments = read(CODER, list(coder(f"city>\n{city}")))
    assert isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.text) == {"city": city}


def test_text_is_released_as_soon_as_it_can_be_no_mark() -> None:
    parser = HERMES.parser(TOOLS)
    assert parser.feed("Hel") == [Content("Hel")]
    assert parser.feed("lo <tool") == [Content("lo")]
    assert parser.feed("box> a") == [Content(" <toolbox> a")]
    assert parser.feed('<tool_call>{"name": "nope') == [Content('<tool_call>{"name": "nope')]


def test_arguments_stream_as_they_come() -> None:
    parser = HERMES.parser(TOOLS)
    assert parser.feed('<tool_call>\n{"name": "now", "arguments": ') == []
    assert numbered(parser.feed('{"a"')) == call(0, "now", '{"a"')
    assert parser.feed(": 1}") == [ToolCallArguments(0, ": 1}")]
    parser = CODER.parser(TOOLS)
    begun = parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nPar")
    assert numbered(begun) == call(0, "get_weather", '{"city": "Par')
    assert parser.feed("is\n") == [ToolCallArguments(0, "is")]


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    assert read(HERMES, ["\nHm.", "\n</think>\n\n", NOW], thinking_open=True) == [
        Reasoning("Hm."),
        *call(0, "now", "{}"),
    ]


def test_without_tools_nothing_is_a_call() -> None:
    for dialect, text in ((HERMES, NOW), (CODER, CODER_NOW), (LLAMA, '{"name": "now"}')):
        parser = dialect.parser([])
        assert joined(parser.feed(text, is_last=True)) == [Content(text)]


def test_deep_and_long_calls_are_text_or_calls_and_no_error() -> None:
    for before, inner, after in (
        ("<|tool_call>call:now{a:", "[", "]"),
        ("<|tool_call_start|>[now(a=", "(", ")"),
        ("<|tool_call_start|>[now(a=", "-", ""),
        ("<tool_call>now<arg_key>", "a", ""),
    ):
        text = before + 30_000 * inner + "1" + 30_000 * after
        for dialect in OTHERS:
            said = [event.text for event in read(dialect, [text]) if isinstance(event, Content)]
            assert sum(map(len, said)) > 29_000


def test_ids_differ() -> None:
    ids = {call_id() for _ in range(100)}
    assert len(ids) == 100 and all(name.startswith("call_") for name in ids)


def test_templates_without_calls_are_plain() -> None:
    assert dialect_of("{{ messages }}") == PLAIN
    assert dialect_of("<think>") == Dialect(thinking=THINK)
    assert dialect_of(None) == PLAIN
