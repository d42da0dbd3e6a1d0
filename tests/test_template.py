"""Chat templates of model files: rendered as written, and never more than a line of complaint."""

from __future__ import annotations

from typing import Any

import llama_cpp.llama_cpp as api
import pytest

from dflash_local import runtime
from dflash_local.chat import ChatTemplate
from dflash_local.demo import pair
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

HELLO = [{"role": "user", "content": "Hello"}]


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
    assert template("{{ tools is none }}").render(HELLO) == "True"


def test_special_tokens_are_those_of_the_file() -> None:
    assert template("{{ bos_token }}|{{ eos_token }}").render(HELLO) == "<s>|</s>"


def test_the_shipped_model_s_template_renders() -> None:
    runtime.init()
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(pair()[0]).encode(), params)
    try:
        source = api.llama_model_chat_template(model, None)
        assert source is not None
        prompt = template(source.decode()).render(HELLO)
    finally:
        api.llama_model_free(model)
    assert "Hello" in prompt


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
    ("messages", "part"),
    [
        ([], "empty"),
        (None, "null"),
        ("Hello", "of type str"),
        ({"role": "user", "content": "Hello"}, "of type dict"),
        (["Hello"], "message 0 is of type str"),
        ([*HELLO, {"content": "x"}], "message 1: role is missing"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": None}], "content is null"),
        ([{"role": 3, "content": "x"}], "role is of type int"),
    ],
)
def test_messages_of_another_shape_are_refused(messages: Any, part: str) -> None:
    assert part in refusal(CHATML, messages)


@pytest.mark.parametrize(
    "name", ["messages", "bos_token", "eos_token", "raise_exception", "self", "strftime_now"]
)
def test_what_the_chat_sets_is_not_the_caller_s(name: str) -> None:
    assert name in refusal(CHATML, HELLO, **{name: "x"})


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [dict(HELLO[0])]
    template("{% set m = messages[0] %}{{ m.content | upper }}").render(messages)
    assert messages == HELLO
