"""Texts that have ended: their number, their owners, and the texts that take one up."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from copies import copies_of
from dflash_local.copies.chances import CopyPrior
from dflash_local.copies.copier import Copier
from dflash_local.copies.earlier import MOST_TEXTS, MOST_TOKENS, EarlierTexts
from dflash_local.llama import native

QUESTION = [5000, 5001, 5002]
N = 8


def unlike(seed: int, n: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(100_000) for _ in range(n)]


FILE = unlike(1, 300)


def index_of(text: list[int]) -> native.CopyIndex:
    index = native.CopyIndex()
    index.extend(text)
    return index


def offered(copier: Copier, text: list[int], begin: int) -> list[list[int]]:
    """The offers at each token of an answer, the first `begin` of them at once."""
    offers = []
    for n in range(begin, len(text)):
        copies = copies_of(copier, QUESTION, text[:n], N)
        offers.append(copies[0].tokens if copies else [])
    return offers


def test_a_file_of_an_earlier_text_is_copied() -> None:
    copier = Copier(CopyPrior(), earlier=[index_of(unlike(2, 50)), index_of([*QUESTION, *FILE])])
    answer = [9000, *FILE[100:200]]
    offers = offered(copier, answer, 1)
    assert offers[:14] == [[]] * 14  # the fewest tokens that are no accident
    assert offers[16:-N] == [answer[i : i + N] for i in range(17, len(answer) - N)]


def test_edits_are_bridged_there_as_well() -> None:
    copier = Copier(CopyPrior(), earlier=[index_of(FILE)])
    answer = [*FILE[:60], 9000, *FILE[61:120]]
    assert offered(copier, answer, 1)[60] == FILE[61 : 61 + N]


def test_a_text_that_repeats_itself_needs_no_other() -> None:
    """Its end stands in it already: it goes on from there, not from the other."""
    repeated = FILE[:40]
    own = [*repeated, 7000, 7001, *repeated]
    copier = Copier(CopyPrior(), earlier=[index_of([*repeated, 8000, 8001, 8002, 8003])])
    (copy, *_) = copies_of(copier, own, [], 2)
    assert copy.tokens == [7000, 7001]


def test_what_was_taken_up_is_not_kept_as_its_own() -> None:
    copier = Copier(CopyPrior(), earlier=[index_of(FILE)])
    answer = FILE[50:90]
    copies_of(copier, QUESTION, answer, N)
    text = copier.ended(QUESTION, [*answer, 9000])
    assert text is not None
    assert len(text) == len(QUESTION) + len(answer) + 1
    assert Copier(CopyPrior()).ended(QUESTION, []) is None  # it never was asked


def test_texts_that_a_model_was_given_are_not_kept_as_its_own() -> None:
    copier = Copier(CopyPrior(), FILE)
    copies_of(copier, QUESTION, [], N)
    text = copier.ended(QUESTION, [9000])
    assert text is not None
    assert len(text) == len(QUESTION) + 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(0, 60), st.integers(1, 9))
def test_it_goes_on_where_it_says(text: list[int], begin: int, n: int) -> None:
    """Against a plain search for the last 16 tokens."""
    other = (text * 3)[begin : begin + 16 * n]
    end = other[-16:]
    expected = len(other) >= 16 and any(
        text[i : i + 16] == end for i in range(len(text) - 16) if len(text) > i + 16
    )
    assert index_of(text).goes_on(index_of(other)) == expected


def test_each_owner_has_its_own() -> None:
    texts = EarlierTexts()
    mine, yours = index_of(FILE), index_of(unlike(3, 40))
    texts.keep("me", mine)
    texts.keep("you", yours)
    assert texts.of("me") == [mine]
    assert texts.of("you") == [yours]
    assert texts.of(None) == texts.of("") == []


def test_the_oldest_make_room() -> None:
    texts = EarlierTexts()
    indexes = [index_of(unlike(seed, 30)) for seed in range(MOST_TEXTS + 3)]
    for index in indexes:
        texts.keep("me", index)
    assert texts.of("me") == indexes[: -MOST_TEXTS - 1 : -1]


def test_memory_is_bounded() -> None:
    texts = EarlierTexts()
    for seed in range(5):
        texts.keep("me", index_of(unlike(seed, MOST_TOKENS // 3)))
    assert len(texts) == 3 and texts.n_tokens <= MOST_TOKENS
    assert sum(index.n_bytes for index in texts.of("me")) < 8 << 20
    texts.keep("me", index_of(unlike(9, MOST_TOKENS + 1)))
    assert len(texts) == 3


def test_a_conversation_that_goes_on_is_kept_once() -> None:
    texts = EarlierTexts()
    texts.keep("me", index_of(FILE[:100]))
    texts.keep("you", index_of(FILE[:100]))
    whole = index_of(FILE)
    texts.keep("me", whole)
    assert texts.of("me") == [whole]
    assert len(texts.of("you")) == 1
