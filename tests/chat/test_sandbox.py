"""A template that runs away is stopped, in any thread, with a line that says why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from chat_models import HELLO
from dflash_local.chat.template import ChatTemplate
from dflash_local.errors import InputError


def bounded(source: str, *, max_seconds: float = 60) -> ChatTemplate:
    """A template with tight bounds."""
    return ChatTemplate(source, bos="", eos="", max_seconds=max_seconds, max_characters=20_000)


DOUBLED = (
    "{% set all = namespace(x='ab') %}{% for i in range(99) %}{% set all.x = EACH %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.1 s"),
        (
            "{% macro f(n) %}{% if n %}{% set x = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}"
            "{{ f(99) }}",
            "0.1 s",
        ),
        ("{% for a in range(99999) %}text{% endfor %}", "20000 characters"),
        ("{{ 'text' * 99999 }}", "20000 characters"),
        ("{{ [1] * 99999 }}", "20000 characters"),
        (DOUBLED.replace("EACH", "all.x ~ all.x"), "20000 characters"),
        (DOUBLED.replace("EACH", "all.x + all.x"), "20000 characters"),
        (DOUBLED.replace("EACH", "[all.x, all.x] | join"), "20000 characters"),
        (DOUBLED.replace("EACH", "all.x.join([all.x, all.x])"), "20000 characters"),
        (DOUBLED.replace("EACH", "all.x.replace('a', all.x)"), "20000 characters"),
        (DOUBLED.replace("EACH", "all.x | replace('a', all.x)"), "20000 characters"),
        (DOUBLED.replace("EACH", "'%s%s' % (all.x, all.x)"), "20000 characters"),
        (DOUBLED.replace("EACH", "'{0}{0}'.format(all.x)"), "20000 characters"),
        (DOUBLED.replace("EACH", "[all.x, all.x]") + "{{ all.x }}", "20000 characters"),
        (DOUBLED.replace("EACH", "[all.x, all.x]") + "{{ all.x | tojson }}", "20000 characters"),
        ("{% set x = range(999) | map('center', 999) | list %}", "20000 characters"),
        ("{{ 'a' | center(10 ** 9) }}", "center of 1000000000 is too big"),
        ("{{ 'a'.ljust(10 ** 9) }}", "ljust of 1000000000 is too big"),
        ("{{ [1] | batch(10 ** 9, 'x') | list }}", "batch of 1000000000 is too big"),
        ("{{ '%999999999d' % 1 }}", "width"),
        ("{{ '{:999999999}'.format(1) }}", "width"),
        ("{{ 9 ** 9999999 }}", "number is too big"),
        ("{{ 'a'.translate({97: 'b'}) }}", "translate"),
    ],
)
def test_a_template_that_runs_away_is_stopped(source: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        bounded(source, max_seconds=0.1 if part == "0.1 s" else 60).render(HELLO)


def test_templates_are_stopped_in_any_thread() -> None:
    turns = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    loop = bounded(turns, max_seconds=0.1)
    with ThreadPoolExecutor(2) as pool:
        for attempt in [pool.submit(loop.render, HELLO) for _ in range(2)]:
            assert isinstance(attempt.exception(), InputError)


def test_one_rendering_s_use_does_not_count_for_the_next() -> None:
    long = bounded("{{ messages[0].content * 4000 }}")
    assert all(len(long.render(HELLO)) == 20_000 for _ in range(40))
