"""Lines about something, on stderr."""

import io
import sys

import pytest

from dflash_local.printable import to_stderr


def test_a_line_is_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    to_stderr("model\x1b[2J.gguf")
    assert capsys.readouterr() == ("", "model\N{REPLACEMENT CHARACTER}[2J.gguf\n")


@pytest.mark.parametrize("is_closed", [True, False])
def test_without_a_stderr_nothing_happens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if is_closed else None)
    to_stderr("a line")
    assert capsys.readouterr().out == ""
