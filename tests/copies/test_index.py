"""The index of a text: its offers stand in the text, and edits do not lose the place."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_local.llama import native

texts = st.lists(st.integers(0, 2), min_size=1, max_size=120)
N_LENGTHS, N_AGREEMENTS = 9, 3
FOUND, RESUMED, REPLACED, INSERTED = range(4)


def index_of(text: list[int]) -> native.CopyIndex:
    index = native.CopyIndex()
    index.extend(text)
    return index


def find(index: native.CopyIndex, n_copies: int, n: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and cells of each continuation."""
    offers = native.CopyOffers(native.CopyPrior())
    offers.find(index, n_copies, n)
    return [(tokens, cells) for tokens, cells, _ in offers.last]


def origin(cells: list[int]) -> int:
    return cells[0] // (N_LENGTHS * N_AGREEMENTS)


def longest_match(text: list[int]) -> int:
    """The number of last tokens of a text that it also has earlier, with another after them."""
    best = 0
    for end in range(1, len(text)):
        n = 0
        while n < end and text[end - 1 - n] == text[-1 - n]:
            n += 1
        best = max(best, n)
    return best


def continues(text: list[int], tokens: list[int]) -> bool:
    """Whether these tokens follow some place of the text, as often repeated as it takes."""
    for begin in range(len(text)):
        source = text[begin:]
        if tokens == (source * (1 + len(tokens) // len(source)))[: len(tokens)]:
            return True
    return False


@given(texts, st.integers(1, 70))
def test_offers_stand_in_the_text(text: list[int], n: int) -> None:
    copies = find(index_of(text), 4, n)
    assert bool(copies) == (longest_match(text) >= 2)
    for tokens, cells in copies:
        assert len(tokens) == len(cells) == n
        assert all(0 <= cell < native.CopyIndex.n_cells for cell in cells)
        assert continues(text, tokens)


@given(texts, st.data())
def test_it_is_the_same_in_pieces(text: list[int], data: st.DataObject) -> None:
    """A prompt at once, an answer token by token: the matches are the same."""
    cut = data.draw(st.integers(0, len(text)))
    pieces = index_of(text[:cut])
    for token in text[cut:]:
        pieces.extend([token])
    assert find(pieces, 4, 8) == find(index_of(text), 4, 8)


@given(st.integers(1, 12), st.integers(20, 60), st.integers(0, 3), st.integers(0, 3))
def test_a_copy_goes_on_behind_an_edit(begin: int, at: int, n_new: int, n_old: int) -> None:
    """`n_old` tokens are replaced by `n_new`: after them, or a token later, the copy is back."""
    source = list(range(1000, 1100))
    index = index_of([*source, 1])
    written = source[begin:at] + [1 + i for i in range(n_new)]
    rest = source[at + n_old :]
    for token in written[:2]:
        index.extend([token])
    for token in written[2:]:
        find(index, 4, 4)
        index.extend([token])
    for n_more in range(3):
        copies = find(index, 4, 4)
        if any(tokens[:3] == rest[n_more : n_more + 3] for tokens, _ in copies):
            break
        index.extend([rest[n_more]])
    assert n_more < 2


def test_a_replaced_token_is_guessed_at_once() -> None:
    source = list(range(100, 140))
    index = index_of(source)
    for token in source[:10]:
        find(index, 4, 8)
        index.extend([token])
    find(index, 4, 8)
    index.extend([7])  # in place of source[10]
    offers = {origin(cells): tokens for tokens, cells in find(index, 4, 4)}
    assert offers[REPLACED] == source[11:15]
    assert offers[INSERTED] == source[10:14]


def test_those_that_agree_are_told_from_those_that_differ() -> None:
    def agreement(text: list[int]) -> int:
        (_, cells), *_ = find(index_of(text), 1, 1)
        return cells[0] // N_LENGTHS % N_AGREEMENTS

    assert agreement([1, 2, 3, 9, 1, 2]) == 0
    assert agreement([1, 2, 3, 8, 1, 2, 3, 9, 1, 2]) == 1
    assert agreement([1, 2, 4, 8, 1, 2, 3, 9, 1, 2]) == 2


def test_memory_grows_with_the_text_alone() -> None:
    """Also for a text that repeats one token, or none."""
    n = 100_000
    assert index_of([5] * n).n_bytes == index_of(list(range(n))).n_bytes < 100 * n
    assert len(find(index_of([5] * n), 4, 63)[0][0]) == 63
