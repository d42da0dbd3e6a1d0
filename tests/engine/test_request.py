"""A request is refused for what is wrong with it, in one line, before anything is decoded."""

from typing import Any

import pytest

from dflash_local.engine.request import Request
from dflash_local.errors import ContextFullError, InputError
from dflash_local.sampling.params import SamplingParams

N_VOCAB, N_CTX, MAX_WIDTH = 8192, 256, 16


def check(max_width: int = MAX_WIDTH, **changes: Any) -> None:
    given = {"prompt": [1], "max_tokens": 24, "draft_width": 16 if max_width else 0, **changes}
    Request(**given).check(N_VOCAB, N_CTX, max_width, "this drafter's block")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": []}, InputError, "the prompt is empty"),
        ({"prompt": [5, -1]}, InputError, "token id -1 of the prompt is not in 0 to 8191"),
        ({"prompt": [8192]}, InputError, "token id 8192 of the prompt is not in 0 to 8191"),
        ({"prompt": [1] * 256}, ContextFullError, "has 256 tokens, the context holds 256"),
        ({"max_tokens": 0}, InputError, "max_tokens is 0; expected a whole number, 1 or more"),
        ({"max_tokens": 2.5}, InputError, "max_tokens is 2.5; expected a whole number"),
        ({"max_tokens": -(10**30)}, InputError, "max_tokens is -1"),
        ({"max_tokens": float("nan")}, InputError, "max_tokens is nan"),
        ({"max_tokens": "5"}, InputError, "max_tokens is '5'"),
        ({"max_tokens": True}, InputError, "max_tokens is True; expected a whole number"),
        ({"sampling": SamplingParams(min_tokens=25)}, InputError, "min_tokens is 25, but max"),
        ({"draft_width": -1}, InputError, "draft_width is -1; expected a whole number, 0 or more"),
        ({"draft_width": 17}, InputError, "draft_width is 17; this drafter's block allows .* 16"),
        ({"draft_width": 10**30}, InputError, "draft_width is 1000"),
        ({"draft_width": "8"}, InputError, "draft_width is '8'"),
        ({"draft_width": 2.5}, InputError, r"draft_width is 2\.5"),
        ({"max_width": 0, "draft_width": 8}, InputError, "8, but there is no drafter; load one"),
        ({"id_slot": -1}, InputError, "id_slot is -1; expected a whole number, 0 or more"),
        ({"n_keep": -2}, InputError, "n_keep is -2; expected a whole number, -1 or more"),
        ({"n_discard": -1}, InputError, "n_discard is -1; expected a whole number, 0 or more"),
        ({"prompt_logprobs": 8193}, InputError, "prompt_logprobs is 8193; expected 0 to 8192"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as found:
        check(**changes)
    assert "\n" not in str(found.value)


def test_the_most_that_is_taken() -> None:
    check(prompt=[0, N_VOCAB - 1] + [5] * (N_CTX - 3), sampling=SamplingParams(min_tokens=24))
    check(id_slot=0, n_keep=-1, n_discard=0, prompt_logprobs=N_VOCAB)
    check(draft_width="auto")
    check(max_width=0, draft_width=1)
    check(max_width=0, draft_width="auto")


def test_who_drafts() -> None:
    drafts = {width: Request([1], draft_width=width).drafts for width in (0, 1, 2, "auto")}
    assert drafts == {0: False, 1: False, 2: True, "auto": True}
