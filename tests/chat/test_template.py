"""Chat templates of model files: rendered as written, and never more than a line of complaint."""

import json
from datetime import datetime
from typing import Any

import pytest

import chat_models
from chat_models import CALLED, HELLO
from dflash_local.chat.events import Reasoning, ToolCallArguments, ToolCallStart, joined
from dflash_local.chat.families import dialect_of
from dflash_local.chat.template import ChatTemplate
from dflash_local.chat.tool import Tool
from dflash_local.errors import InputError

CHATML = """{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}
{%- endif %}"""


def template(source: str | None = CHATML) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>")


def refusal(source: str | None, messages: Any = HELLO, /, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        template(source).render(messages, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_messages_become_a_prompt_for_the_assistant() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert template().render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_caller_s_variables_reach_the_template() -> None:
    assert template().render(HELLO, enable_thinking=False).endswith("assistant\n<think></think>\n")
    assert template("{{ tools[0].name }}").render(HELLO, tools=[{"name": "f"}]) == "f"
    for tools in (None, []):
        assert template("{{ tools is none }}").render(HELLO, tools=tools) == "True"
    assert template("{{ bos_token }}|{{ eos_token }}").render(HELLO) == "<s>|</s>"


@pytest.mark.parametrize("tools", [[1], 1, "x", True, {"a": 1}])
def test_tools_of_another_shape_are_refused(tools: Any) -> None:
    assert "tools are not a list of objects" in refusal(CHATML, HELLO, tools=tools)


def test_no_template_points_to_raw_completion() -> None:
    assert "raw completion" in refusal(None)
    assert "raw completion" in refusal("")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{% if %}", "line 1 of the template"),
        ("a\n{% for m in messages %}", "cannot be read"),
        ("{% nonsense %}", "nonsense"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ messages[0].update(role='x') }}", "is unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
        ("{{ strftime_now(3) }}", "strftime"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_one_line(source: str, part: str) -> None:
    assert part in refusal(source)


@pytest.mark.parametrize(
    "name", ["messages", "bos_token", "eos_token", "raise_exception", "self", "strftime_now"]
)
def test_what_the_chat_sets_is_not_the_caller_s(name: str) -> None:
    assert name in refusal(CHATML, HELLO, **{name: "x"})


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [dict(HELLO[0])]
    template("{% set m = messages[0] %}{{ m.content | upper }}").render(messages)
    assert messages == HELLO


def test_qwen3_is_shown_tools_calls_and_answers() -> None:
    prompt = template(chat_models.template("qwen3")).render(CALLED, tools=[chat_models.NOW])
    assert '<tools>\n{"type": "function", "function": {"name": "now"}}\n</tools>' in prompt
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    answers = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwindy\n</tool_response>"
    assert prompt.endswith(
        f"<|im_start|>assistant\n<think>\nHm.\n</think>\n\n{call}\n{call}<|im_end|>\n"
        f"<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_of_ours_are_shown_in_openai_s_shape() -> None:
    tools = [Tool.of(chat_models.WEATHER)]
    assert json.loads(template("{{ tools | tojson }}").render(HELLO, tools=tools)) == [
        chat_models.WEATHER
    ]


def test_what_a_dialect_reads_goes_back_into_its_history() -> None:
    qwen = template(chat_models.template("qwen3"))
    prompt = qwen.render(CALLED[:1])
    whole = qwen.render(CALLED)
    answer = whole[len(prompt) : whole.index("<|im_end|>", len(prompt))]
    parser = dialect_of(chat_models.template("qwen3")).parser([Tool("get_weather")])
    read = joined(parser.feed(answer, is_last=True))
    ids = [event.id for event in read if isinstance(event, ToolCallStart)]
    assert read == [
        Reasoning("Hm."),
        ToolCallStart(0, ids[0], "get_weather"),
        ToolCallArguments(0, '{"city": "Paris"}'),
        ToolCallStart(1, ids[1], "get_weather"),
        ToolCallArguments(1, '{"city": "Paris"}'),
    ]


@pytest.mark.parametrize("family", chat_models.FAMILIES)
def test_a_conversation_with_calls_renders_in_each_family(family: str) -> None:
    prompt = template(chat_models.template(family)).render(CALLED, tools=[chat_models.WEATHER])
    assert prompt.count("Paris") == 2
    assert prompt.index("sunny") < prompt.index("windy")


def test_several_calls_come_one_by_one_where_the_template_takes_one() -> None:
    for family in ("llama31", "harmony"):
        prompt = template(chat_models.template(family)).render(CALLED)
        first = prompt.index("Paris")
        assert first < prompt.index("sunny") < prompt.index("Paris", first + 1)


def test_gpt_oss_is_shown_what_was_said_and_thought_before_a_call() -> None:
    said = {**CALLED[1], "content": "Let me look."}
    prompt = template(chat_models.template("harmony")).render([CALLED[0], said, CALLED[2]])
    assert "analysis<|message|>Hm.\n\nLet me look.<|end|>" in prompt


def test_a_prompt_that_ends_in_reasoning_is_known() -> None:
    dialect = dialect_of(chat_models.template("qwen3"))
    assert dialect.is_thinking("<|im_start|>assistant\n<think>\n")
    assert not dialect.is_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert dialect.has_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not dialect.is_thinking("What is <think>?<|im_end|>\n<|im_start|>assistant\n")


NO_SYSTEM = """{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"""
DROPS_SYSTEM = """{%- for message in messages if message.role != 'system' -%}
[{{ message.role }}]{{ message.content }}{% endfor %}"""


@pytest.mark.parametrize("source", [NO_SYSTEM, DROPS_SYSTEM])
def test_a_system_message_without_a_place_goes_into_the_first_turn(source: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert template(source).render(messages) == "[user]Be brief.\nHello"
    assert template(source).render(HELLO) == "[user]Hello"


def test_a_refusal_for_another_reason_is_told() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert "never" in refusal("{{ raise_exception('never') }}", messages)


def test_llama_server_s_variables_are_there() -> None:
    told = template("{{ date_string }}|{{ enable_thinking }}").render(HELLO)
    date, thinking = told.split("|")
    assert thinking == "True"
    assert abs(datetime.strptime(date, "%d %b %Y") - datetime.now()).days <= 1
    assert template("{{ date_string }}").render(HELLO, date_string="1 May") == "1 May"
    assert template("{{ datetime }}").render(HELLO) == datetime.now().strftime("%b %d %Y")


KIMI = """{%- set seen = namespace(ids=[]) -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set id = 'functions.' + call.function.name + ':' + (loop.index0 | string) -%}
{%- set _ = seen.ids.append(id) -%}
{{ id }} {{ call.function.arguments | tojson }}
{% endfor -%}
{%- elif message.role == 'tool' -%}
{{ seen.ids.pop(0) }} {{ message.content }}
{% endif -%}
{%- endfor -%}"""


def test_a_template_may_change_lists_of_its_own() -> None:
    """As Kimi K2's does, which numbers the calls of tools; not those that it is given."""
    found = template(KIMI)
    for _ in range(2):
        assert found.render(CALLED) == (
            'functions.get_weather:0 {"city": "Paris"}\n'
            'functions.get_weather:1 {"city": "Paris"}\n'
            "functions.get_weather:0 sunny\nfunctions.get_weather:1 windy\n"
        )
    assert "is unsafe" in refusal("{% set x = messages[0] %}{{ x.clear() }}")
    assert "unsafe" in refusal("{% set x = [] %}{{ x.__class__.__mro__ }}")


def test_variables_that_are_null_and_arguments_as_texts() -> None:
    """As llama-server gives them, for templates that can do with nothing else."""
    assert template("{% for tool in tools %}{% endfor %}Hi").render(HELLO) == "Hi"
    source = "{{ 'call ' + messages[1].tool_calls[0].function.arguments }}"
    assert template(source).render(CALLED) == 'call {"city": "Paris"}'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ preserve_thinking }}|{{ clear_thinking }}|{{ truncate_history_thinking }}|"
            "{{ drop_thinking }}",
            "True|False|False|False",
        ),
        ("{{ 'a: ' + messages[0].nothing + '.' }}", "a: ."),
        ("{{ messages[0].nothing + 'a' }}", "a"),
        ("{{ 'Use '|safe + tools[0].function | tojson }}", 'Use {"name": "now"}'),
        ("{{ tools | map(attribute='type') | tojson }}", '["function"]'),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc{#- x -#}\n d", "a\nb\ncd"),
    ],
)
def test_what_llama_server_writes(source: str, expected: str) -> None:
    """Its own answers to /apply-template."""
    assert template(source).render(HELLO, tools=[chat_models.NOW]) == expected


def test_what_is_not_there_is_no_text_by_itself() -> None:
    assert "'dict object' has no attribute 'nothing'" in refusal("{{ messages[0].nothing.more }}")
    assert "has no attribute 'nothing'" in refusal("{{ 1 + messages[0].nothing }}")


def test_earlier_reasoning_may_be_left_out() -> None:
    source = "{{ messages[1].reasoning_content if not clear_thinking }}"
    messages = [*HELLO, {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}]
    assert template(source).render(messages) == "Hm."
    assert template(source).render(messages, clear_thinking=True) == ""


def test_firefunction_s_name_for_tools() -> None:
    found = template("{{ '\n' + functions }}")
    assert json.loads(found.render(HELLO, tools=[chat_models.NOW])) == [{"name": "now"}]
    assert found.render(HELLO) == "\n"


ANSWERS_BESIDE_CALLS = """{%- for message in messages -%}
[{{ message['role'] }}]
{%- for call in message['tool_calls'] or [] -%}({{ call.function.name }}){%- endfor -%}
{%- for answer in message['tool_responses'] or [] -%}
<{{ answer.name }}: {{ answer.response }}>
{%- endfor -%}
{{ message['content'] }}
{%- endfor -%}"""


def test_answers_of_tools_beside_the_calls() -> None:
    """As Gemma 4's first template reads them."""
    found = template(ANSWERS_BESIDE_CALLS)
    called = "(get_weather)(get_weather)<get_weather: sunny><get_weather: windy>"
    assert found.render(CALLED) == f"[user]Weather?[assistant]{called}"
    later = [{"role": "assistant", "content": "Mixed."}, {"role": "user", "content": "Bye"}]
    assert found.render([*CALLED, *later]) == f"[user]Weather?[assistant]{called}Mixed.[user]Bye"
    said = [CALLED[0], {**CALLED[1], "content": "Let me look."}, *CALLED[2:]]
    assert found.render(said) == f"[user]Weather?[assistant]Let me look.[assistant]{called}"
    numbers = [*CALLED[:2], {**CALLED[2], "content": '{"celsius": 20}'}]
    assert "<get_weather: {'celsius': 20}>" in found.render(numbers)


THOUGHTS_IN_PARTS = """{%- for message in messages -%}
{%- if message['content'] is string -%}[{{ message['content'] }}]
{%- else -%}
{%- for block in message['content'] -%}
{%- if block['type'] == 'thinking' -%}<{{ block['thinking'] }}>{%- else -%}{{ block['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}"""


def test_reasoning_as_a_part_of_the_content() -> None:
    """As Ministral's template reads it."""
    answer = {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}
    found = template(THOUGHTS_IN_PARTS)
    assert found.render([*HELLO, answer]) == "[Hello]<Hm.>Hi."
    assert found.render([*HELLO, {**answer, "content": None}]) == "[Hello]<Hm.>"
    assert found.render([*HELLO, {**answer, "tool_calls": [chat_models.CALL]}]) == "[Hello]<Hm.>Hi."
