"""Grammars that clients send: none holds up the others."""

import asyncio
import string
from typing import Any

import httpx
import pytest

from dflash_local import GrammarError, Model
from dflash_local.sampling import grammar as grammar_module


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= (("a"|"")("b"|"")){0,50} "z"',
        'root ::= x{2,40}\nx ::= "a"?',
        "root ::= (x x x x x x x x)+\nx ::= [a-z ]? y\ny ::= [a-z ]? z\nz ::= [a-z ]?",
    ],
)
def test_an_ambiguous_grammar_holds_nobody_up(client: httpx.Client, grammar: str) -> None:
    body = {"prompt": "a", "grammar": grammar, "n_predict": 16, "seed": 1}
    answer = client.post("/completion", json=body)
    assert answer.status_code == 200
    assert set(answer.json()["content"]) <= set(string.ascii_lowercase + " ")


def test_nobody_waits_for_grammars_of_others(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_LONGEST_TRIAL_S", 1.0)

    def endless(salt: int) -> dict[str, Any]:
        patterns = [{"type": "string", "pattern": f".*{salt}x{i}.*"} for i in range(24)]
        return {"allOf": patterns}

    async def run() -> int:
        known: dict[str, Any] = {"max_tokens": 2, "json_schema": {"type": "integer"}}
        await model.agenerate("def", **known)
        first = asyncio.ensure_future(model.agenerate("def", max_tokens=2, json_schema=endless(0)))
        others = [
            asyncio.ensure_future(model.agenerate("def", max_tokens=2, json_schema=endless(i)))
            for i in range(1, 40)
        ]
        await asyncio.sleep(0)  # they have asked
        assert (await model.agenerate("def", max_tokens=2)).tokens
        assert (await model.agenerate("def", **known)).tokens
        left = sum(not task.done() for task in others)
        for task in others:
            task.cancel()
        with pytest.raises(GrammarError, match="simplify"):
            await first
        await asyncio.gather(*others, return_exceptions=True)
        return left

    assert asyncio.run(run()) > 30
