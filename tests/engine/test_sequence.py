"""The state of one answer: what it emits, how it ends, and what it leaves out of its text."""

from collections.abc import Iterator
from typing import Any

import pytest

from dflash_local.draft.shape import Chain
from dflash_local.engine.request import Request
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slot
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler
from dflash_local.stats import Stats

N_CTX = 256
PROMPT = list(range(40))


@pytest.fixture(scope="module")
def sampler() -> Iterator[Sampler]:
    with Sampler(SamplingParams(), 512, n_ctx=N_CTX) as opened:
        yield opened


def begun(sampler: Sampler, **options: Any) -> Sequence:
    return Sequence(Request(PROMPT, **options), Slot(0), sampler, Stats(), Chain(15))


def test_an_answer_ends_with_its_last_token(sampler: Sampler) -> None:
    seen: list[int] = []
    stops = SamplingParams(stop_token_ids=(7,))

    def on_token(token: int) -> bool:
        seen.append(token)
        return token == 9

    for tokens, last, reason in (
        ([5, 5, 5, 5], False, "length"),
        ([5, 9], False, "stop"),
        ([5, 7], False, "stop"),
        ([5, 3], True, "stop"),
    ):
        seen.clear()
        sequence = begun(sampler, max_tokens=4, on_token=on_token, sampling=stops)
        ends = [sequence.emit(token, ends_text=False) for token in tokens[:-1]]
        assert not any(ends) and sequence.finish_reason is None
        assert sequence.remaining == 4 - len(ends)
        assert sequence.emit(tokens[-1], ends_text=last)
        assert (sequence.finish_reason, sequence.anchor) == (reason, tokens[-1])
        # What ends a text is not told.
        assert seen == (tokens[:-1] if last or tokens[-1] == 7 else tokens)
        assert sequence.text == PROMPT + tokens


@pytest.mark.parametrize(
    ("options", "n_kept", "n_left_out"),
    [
        ({"n_keep": 0}, 0, 128),
        ({"n_keep": -1}, 40, 108),
        ({"n_keep": 16, "n_discard": 100}, 16, 100),
        ({"n_keep": 100}, 100, 78),
        # No shift soon follows another: a sixteenth of the context is left out at least.
        ({"n_keep": 0, "n_discard": 1}, 0, 16),
        ({"n_keep": N_CTX}, N_CTX - 32, 16),
        ({"n_keep": 0, "n_discard": 1000}, 0, N_CTX - 1),
    ],
    ids=str,
)
def test_a_shift_leaves_out_what_follows_the_kept(
    sampler: Sampler, options: dict[str, int], n_kept: int, n_left_out: int
) -> None:
    sequence = begun(sampler, **options)
    for token in range(N_CTX - len(PROMPT)):
        sequence.emit(token, ends_text=False)
    whole = sequence.text
    assert len(whole) == N_CTX and not sequence.shift(N_CTX)
    sequence.emit(5, ends_text=False)
    assert sequence.shift(N_CTX) and sequence.stats.shifts == 1
    assert sequence.text == whole[:n_kept] + [*whole, 5][n_kept + n_left_out :]
    # The anchor is in no cache, and all else is decoded again.
    assert sequence.n_left == len(sequence.text) - 1
    assert not sequence.shift(N_CTX)
