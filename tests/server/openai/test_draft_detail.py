"""A stream's details of its drafts when asked, and a request's own width."""

from itertools import pairwise
from typing import Any

import httpx
import pytest

from dflash_local.result import Chunk, Piece
from dflash_local.server.openai.chat import DraftDetail
from openai_api import CHAT, QUESTION, ask, streamed, user

NON_ASCII = "root ::= [äöüßéñ€日本語한국🙂😀]{14}"


def chunks(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    asked = {"messages": user(QUESTION), "temperature": 0, "max_tokens": 48, "draft_detail": True}
    return streamed(client, CHAT, **{**asked, **body})


def text(pieces: list[dict[str, Any]], *, from_draft: bool | None = None) -> str:
    wanted = (True, False) if from_draft is None else (from_draft,)
    return "".join(piece["text"] for piece in pieces if piece["from_draft"] in wanted)


def pieces(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [piece for chunk in found for piece in chunk["draft_detail"]["pieces"]]


def rounds(found: list[dict[str, Any]]) -> list[int]:
    return [n for chunk in found for n in chunk["draft_detail"]["rounds"]]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "more",
    [{}, {"stop": ["return"]}, {"grammar": NON_ASCII}, {"n": 2}, {"logprobs": True}],
    ids=str,
)
def test_pieces_are_the_text(client: httpx.Client, more: dict[str, Any]) -> None:
    for chunk in chunks(client, **more):
        delta = chunk["choices"][0]["delta"]
        told = chunk["draft_detail"]["pieces"] if "draft_detail" in chunk else []
        assert text(told) == delta.get("content", "")
        assert all(piece["text"] for piece in told)
        marks = [(piece["from_draft"], piece.get("from_copy")) for piece in told]
        assert all(a != b for a, b in pairwise(marks))


def test_rounds_are_what_the_drafts_were_worth(client: httpx.Client) -> None:
    _, *found = chunks(client)
    timings = found[-1]["timings"]
    assert timings["draft_n_accepted"] > 0
    assert sum(rounds(found)) == timings["predicted_n"] - 1  # the first one is the prompt's
    assert sum(n - 1 for n in rounds(found)) == timings["draft_n_accepted"]
    assert text(pieces(found), from_draft=True) and text(pieces(found), from_draft=False)


def test_copies_are_told_from_a_drafters_tokens() -> None:
    told = [Piece("def ", True), Piece("f(x)", True, True), Piece(": ", False)]
    detail = DraftDetail()
    detail.push(Chunk("def f(x): ", [], pieces=told))
    assert detail.take("def f(x): ")["pieces"] == [
        {"text": "def ", "from_draft": True},
        {"text": "f(x)", "from_draft": True, "from_copy": True},
        {"text": ": ", "from_draft": False},
    ]


def test_a_request_chooses_whether_it_drafts(client: httpx.Client) -> None:
    """The text is the same, whoever wrote it."""
    _, *drafted = chunks(client, draft_width=4)
    _, *plain = chunks(client, draft_width=0)
    assert max(rounds(drafted)) in (2, 3, 4)
    assert set(rounds(plain)) == {1}
    assert "draft_n" not in plain[-1]["timings"]
    assert text(pieces(plain), from_draft=True) == ""
    assert text(pieces(plain)) == text(pieces(drafted))
    assert ask(client, temperature=0, max_tokens=8, draft_width=0)["choices"]


def test_what_the_controller_decides_and_why(client: httpx.Client) -> None:
    _, *fixed = chunks(client, max_tokens=8)
    assert {chunk["draft_detail"]["drafting"] for chunk in fixed} == {None}
    _, *chosen = chunks(client, draft_width="auto")
    reasons = {chunk["draft_detail"]["drafting"] for chunk in chosen}
    assert all(reason.startswith("drafting ") and "\n" not in reason for reason in reasons)


def test_reasoning_has_pieces_too(tool_client: httpx.Client) -> None:
    grammar = 'root ::= "<think>I add the two numbers.</think>def add(a, b):"'
    _, *found = chunks(tool_client, grammar=grammar, draft_width=8)
    shown = {"content": "", "reasoning_content": ""}
    for chunk in found:
        delta = chunk["choices"][0]["delta"]
        for name in shown:
            if delta.get(name):
                shown[name] += delta[name]
                assert text(chunk["draft_detail"]["pieces"]) == delta[name]
    assert shown == {"content": "def add(a, b):", "reasoning_content": "I add the two numbers."}


def test_nobody_is_told_who_does_not_ask(client: httpx.Client) -> None:
    found = streamed(client, CHAT, messages=user(QUESTION), max_tokens=4)
    assert not any("draft_detail" in chunk for chunk in found)
