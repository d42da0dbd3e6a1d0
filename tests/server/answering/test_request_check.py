"""Names in a request that the server does not know."""

import pytest

import tiny_coder
from dflash_local.server.answering.api_answer import RequestCheck
from dflash_local.server.answering.sampling_fields import SamplingFields
from dflash_local.server.http.errors import ApiError
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import ModelSource


def test_a_strict_server_refuses_what_it_does_not_know() -> None:
    pool = ModelPool([ModelSource("tiny", tiny_coder.pair()[0])])
    strict, usual = RequestCheck(strict=True), RequestCheck()
    body = SamplingFields.model_validate({"temprature": 0.5, "user": "me"})
    with pytest.raises(ApiError, match="did you mean temperature"):
        strict.check(pool, "tiny", body)
    with pytest.raises(ApiError, match="not found"):
        strict.check(pool, "other", SamplingFields())
    strict.check(pool, None, SamplingFields.model_validate({"user": "me"}))
    usual.check(pool, "other", body)


def test_many_odd_names_hide_no_warning_about_a_model(caplog: pytest.LogCaptureFixture) -> None:
    pool = ModelPool([ModelSource("tiny", tiny_coder.pair()[0])])
    check = RequestCheck()
    for n in range(200):
        check.check(pool, "tiny", SamplingFields.model_validate({f"odd{n}": 1}))
    assert len(caplog.messages) == 100
    for _ in range(2):
        check.tell_once("tiny: has no tokens")
    assert caplog.messages[100:] == ["warning: tiny: has no tokens"]
