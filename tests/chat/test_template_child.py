"""A template that runs away is stopped with a line that says why, and nothing else stands still."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
NESTED = (
    "{% set a = namespace(x=[0], y=[0]) %}{% for i in range(60) %}"
    "{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}"
)
"""Two lists whose comparison takes for ever, in one call."""

LATE = "longer than 1 s"
LONG = "20000 characters"
LARGE = "1024 MiB"


@pytest.mark.one_in(30)
@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", LATE),
        (
            "{% macro f(n) %}{% if n %}{% set x = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}"
            "{{ f(99) }}",
            LATE,
        ),
        (NESTED + "{{ a.x == a.y }}", LATE),
        (NESTED + "{{ [a.x, a.y] | sort }}", LATE),
        (NESTED + "{{ a.x in [a.y] }}", LATE),
        (NESTED + "{{ a.x }}", "MiB|longer"),
        (NESTED + "{{ a.x | tojson(indent=9) }}", "MiB|longer"),
        ("{{ range(9999) | map('center', 9999) | map('list') | sum(start=[]) }}", "MiB|longer"),
        ("{% for a in range(99999) %}text{% endfor %}", LONG),
        ("{{ 'text' * 99999 }}", LONG),
        ("{{ [1] * 99999 }}", LONG),
        (DOUBLED.replace("EACH", "all.x ~ all.x"), LARGE),
        (DOUBLED.replace("EACH", "all.x + all.x"), LARGE),
        (DOUBLED.replace("EACH", "[all.x, all.x] | join"), LARGE),
        (DOUBLED.replace("EACH", "all.x.join([all.x, all.x])"), LARGE),
        (DOUBLED.replace("EACH", "all.x.replace('a', all.x)"), LARGE),
        (DOUBLED.replace("EACH", "all.x | replace('a', all.x)"), LARGE),
        (DOUBLED.replace("EACH", "'%s%s' % (all.x, all.x)"), LARGE),
        (DOUBLED.replace("EACH", "'{0}{0}'.format(all.x)"), LARGE),
        (DOUBLED.replace("EACH", "[all.x, all.x]") + "{{ all.x }}", "MiB|longer"),
        (DOUBLED.replace("EACH", "[all.x, all.x]") + "{{ all.x | tojson }}", "MiB|longer"),
        ("{% set x = range(99999) | map('center', 99999) | list %}", LARGE),
        ("{{ 'a' | center(10 ** 10) }}", LARGE),
        ("{{ 'a'.ljust(5000000000) }}", LARGE),
        ("{{ [1] | batch(10 ** 9, 'x') | list }}", "MiB|longer"),
        ("{{ '%9999999999d' % 1 }}", "MiB|big"),
        ("{{ '{:9999999999}'.format(1) }}", "MiB|big|many"),
        ("{{ 9 ** 999999999 }}", "MiB|longer|digits"),
        ("{{ ('a' * 99999999) | replace('a', 'b' * 99) }}", LARGE),
        ("{{ 'a'.translate({97: 'b' * 99999}) }}", LONG),
    ],
)
def test_a_template_that_runs_away_is_stopped(source: str, part: str) -> None:
    with pytest.raises(InputError, match=part) as caught:
        bounded(source, max_seconds=1 if "longer" in part else 60).render(HELLO)
    assert "\n" not in str(caught.value)


def test_a_template_that_hangs_stops_no_other_thread() -> None:
    """Comparing lists in C holds Python's lock for as long as it takes."""
    hanging, ended = bounded(NESTED + "{{ a.x == a.y }}", max_seconds=1), threading.Event()
    n_turns = 0

    def watch() -> None:
        nonlocal n_turns
        while not ended.wait(0.01):
            n_turns += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(InputError):
        hanging.render(HELLO)
    ended.set()
    watcher.join()
    assert n_turns > 10  # of a hundred


def test_templates_are_stopped_in_any_thread() -> None:
    turns = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    loop = bounded(turns, max_seconds=0.1)
    with ThreadPoolExecutor(2) as pool:
        for attempt in [pool.submit(loop.render, HELLO) for _ in range(2)]:
            assert isinstance(attempt.exception(), InputError)


def test_one_rendering_s_use_does_not_count_for_the_next() -> None:
    long = bounded("{{ messages[0].content * 4000 }}")
    assert all(len(long.render(HELLO)) == 20_000 for _ in range(40))


def test_a_rendering_that_was_stopped_does_not_show_in_the_next() -> None:
    hanging = bounded(NESTED + "{{ a.x == a.y }}", max_seconds=0.1)
    honest = bounded("{{ 1 + 1 }}")
    for _ in range(3):
        with pytest.raises(InputError):
            hanging.render(HELLO)
        assert honest.render(HELLO) == "2"


def test_what_is_no_json_is_refused() -> None:
    for value in (object(), {1, 2}, b"x"):
        with pytest.raises(InputError, match="must be JSON"):
            bounded("{{ x }}").render(HELLO, x=value)
    assert bounded("{{ x }}").render(HELLO, x=(1, 2.5, None)) == "[1, 2.5, None]"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_no_key_is_in_the_process_that_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.trial.child import WarmChild

    monkeypatch.setenv("DFLASH_LOCAL_API_KEY", "secret-of-the-server")
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-hub")
    child = WarmChild("dflash_local.chat.template_child")
    children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text()
    for process in children.split():
        environment = Path(f"/proc/{process}/environ").read_bytes()
        assert process and b"secret-of" not in environment
    assert children and child.is_alive


@pytest.mark.skipif(os.name != "posix", reason="signals are sent to a group of processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_group_of_processes_is_left_to_the_parent(number: signal.Signals) -> None:
    """A server that ends in order still renders for the requests that it has."""
    parent = """
import os, signal, sys
from dflash_local.trial.child import WarmChild
number = int(sys.argv[1])
child = WarmChild("dflash_local.chat.template_child")
signal.signal(number, lambda *_: None)
os.killpg(0, number)
dead = child._process.poll()
print(dead if dead is not None else child.ask({}, limit_s=60).death)
"""
    done = subprocess.run(
        [sys.executable, "-c", parent, str(int(number))],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
