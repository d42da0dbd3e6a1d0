"""The slot that takes a prompt, and the source of its beginning: a decision without a model."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_local.prefixes.reuse import Holder, Reuse, choose, common_prefix, worth_keeping

EMPTY = Holder(0, 0)


def test_a_chat_goes_on_in_its_slot() -> None:
    others = [Holder(3000, 20, last_use=9), EMPTY]
    assert choose([*others, Holder(5000, 4990, last_use=1)]) == Reuse(2, 2, 4990)


def test_a_short_request_leaves_a_long_chat_alone() -> None:
    chat = Holder(5000, 0, last_use=9)
    assert choose([chat, EMPTY]).slot == 1
    assert choose([chat, Holder(300, 0, last_use=10)]).slot == 1
    assert choose([chat, Holder(4000, 0, last_use=1)]).slot == 1


def test_a_chat_that_nobody_comes_back_to_is_given_up() -> None:
    assert choose([Holder(5000, 0, last_use=1), Holder(300, 0, last_use=100)]).slot == 0


def test_what_two_slots_have_is_no_loss() -> None:
    twins = [Holder(2000, 0, n_shared=2000, last_use=8), Holder(2500, 0, n_shared=2000, last_use=7)]
    assert choose([Holder(900, 0, last_use=1), *twins]).slot == 1


def test_a_common_beginning_is_copied_where_going_on_in_place_would_lose_a_chat() -> None:
    """A system prompt that another chat begins with."""
    chat = Holder(5000, 1000, last_use=9)
    assert choose([chat, EMPTY]) == Reuse(1, 0, 1000)
    assert choose([chat]) == Reuse(0, 0, 1000)
    assert choose([Holder(5000, 1000, busy=True), EMPTY]) == Reuse(1, 0, 1000)


def test_a_few_tokens_more_are_not_worth_a_copy() -> None:
    assert choose([Holder(1010, 1010, busy=True), Holder(1000, 1000)]) == Reuse(1, 1, 1000)


def test_changing_a_little_at_the_end_stays_in_place() -> None:
    assert choose([Holder(5000, 4800, last_use=9), EMPTY]) == Reuse(0, 0, 4800)


def test_busy_slots_are_not_taken() -> None:
    busy = Holder(900, 900, busy=True)
    assert choose([busy, busy, EMPTY, busy]).slot == 2


def test_the_store_is_asked_where_it_has_more() -> None:
    slots = [Holder(5000, 100, last_use=9), EMPTY]
    assert choose(slots, (2000, 2100)) == Reuse(1, None, 2000)
    assert choose(slots, (120, 2100)).source == 0  # hardly more than a slot has
    assert choose(slots, (300, 30000)).source == 0  # for which too much would be put back
    assert choose([Holder(2000, 2000)], (2000, 2100)) == Reuse(0, 0, 2000)


holders = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.booleans(), st.integers(0, 50)).map(
        lambda t: Holder(t[0], min(t[0], t[1]), 0, t[2], t[3])
    ),
    min_size=1,
).filter(lambda found: any(not holder.busy for holder in found))


@given(holders)
def test_hardly_a_token_is_missed(found: list[Holder]) -> None:
    choice = choose(found)
    assert not found[choice.slot].busy
    assert choice.source is not None
    assert choice.n_cells == found[choice.source].n_usable
    assert choice.n_cells + 16 > max(holder.n_usable for holder in found)


@given(holders)
def test_nothing_of_worth_is_lost_while_there_is_another_slot(found: list[Holder]) -> None:
    def destroys(i: int, n_kept: int) -> bool:
        return worth_keeping(found[i].n_cached - n_kept, found[i].n_cached)

    choice = choose(found)
    if destroys(choice.slot, choice.n_cells if choice.source == choice.slot else 0):
        free = [i for i, holder in enumerate(found) if not holder.busy]
        assert all(destroys(i, 0) for i in free)


tokens = st.lists(st.integers(0, 1), max_size=9).map(lambda part: part * 60)


@given(tokens, tokens)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
