"""The text of a stream is that of all its bytes, cut before the first stop string."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_local.errors import InputError
from dflash_local.worker.text import TextStream

LETTERS = st.text("ab\u00e9\u6f22\U0001f600", max_size=30)
STOPS = st.lists(st.text("ab\u00e9\u6f22\U0001f600\ufffd", min_size=1, max_size=5), max_size=4)


@st.composite
def pieces(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes cut anywhere, also within characters, also into empty pieces."""
    raw = draw(source)
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    edges = [0, *cuts, len(raw)]
    return [raw[a:b] for a, b in pairwise(edges)]


def cut(text: str, stops: list[str], kept: Sequence[str] = ()) -> tuple[str, bool]:
    """Character by character, the plain way: the definition."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in (*stops, *kept) if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if longest in kept else end - len(longest)], True
    return text, False


def stream(
    tokens: list[bytes], stops: list[str], kept: Sequence[str] = ()
) -> tuple[list[str], bool, str]:
    """Taken chunks, whether a stop string was complete, the rest."""
    out = TextStream(lambda token: tokens[token], stops, kept)
    taken, stopped = [], False
    for token in range(len(tokens)):
        stopped = out.push(token)
        taken.append(out.take())
        if stopped:
            break
    return taken, stopped, out.finish()


TEXTS = LETTERS.map(str.encode)


@given(pieces(TEXTS), STOPS, st.just([]) | STOPS)
@example([b"ab", b"ab", b"c"], ["abc", "b\ufffd"], [])
@example([b"a", b"b", b"c"], ["b"], ["ab"])
def test_chunks_add_up_to_the_text_before_the_stop_string_or_with_it(
    tokens: list[bytes], stops: list[str], kept: list[str]
) -> None:
    taken, stopped, rest = stream(tokens, stops, kept)
    expected, found = cut(b"".join(tokens).decode(), stops, kept)
    assert "".join(taken) + rest == expected
    assert stopped == found


@given(pieces(st.binary(max_size=24) | TEXTS), STOPS)
def test_bytes_that_are_no_text_are_replaced_as_in_one_go(
    tokens: list[bytes], stops: list[str]
) -> None:
    taken, _, rest = stream(tokens, stops)
    expected, _ = cut(b"".join(tokens).decode(errors="replace"), stops)
    assert "".join(taken) + rest == expected


@given(pieces(TEXTS), STOPS)
def test_push_reports_the_stop_string_with_the_token_that_completes_it(
    tokens: list[bytes], stops: list[str]
) -> None:
    taken, stopped, _ = stream(tokens, stops)
    if stopped:
        before = b"".join(tokens[: len(taken) - 1]).decode(errors="ignore")
        assert not cut(before, stops)[1]


@given(pieces(TEXTS), STOPS)
def test_text_is_held_back_only_where_a_stop_string_may_begin(
    tokens: list[bytes], stops: list[str]
) -> None:
    out = TextStream(lambda token: tokens[token], stops)
    shown, seen = "", b""
    for token in range(len(tokens)):
        if out.push(token):
            return
        seen += tokens[token]
        shown += out.take()
        held = seen.decode(errors="ignore")[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_tokens_after_the_stop_string_change_nothing() -> None:
    out = TextStream(lambda token: b"xSTOPy", ["STOP"])
    assert out.push(0)
    assert out.push(0)
    assert (out.take(), out.take(), out.finish()) == ("x", "", "")


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], [None]])
def test_an_empty_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(InputError, match="not empty"):
        TextStream(lambda token: b"", stop)


def test_a_stop_string_that_only_an_unfinished_character_completes_ends_no_text() -> None:
    """The text is cut before it as before any other, but something else has ended it."""
    out = TextStream(lambda token: b"ab\xf0\x9f", ["b\ufffd"])
    assert not out.push(0)
    assert out.take() + out.finish() + out.finish() == "a"
    assert out.stopped_by is None


def test_each_token_ends_where_its_last_whole_character_does() -> None:
    tokens = [b"one\xe2\x82", b"\xac<", b"/s", b">two"]
    out = TextStream(lambda token: tokens[token], ["</s>"])
    for token in range(len(tokens)):
        out.push(token)
    assert out.ends == [3, 5, 7, 11]
