"""`/tokenize` and `/detokenize`, as clients count tokens with them."""

from __future__ import annotations

import httpx

from dflash_local import Model
from openai_api import refused


def test_tokens_and_text(client: httpx.Client, model: Model) -> None:
    text = "naïve <|im_end|> = 1"
    told = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [entry["id"] for entry in told] == model.tokenize(text)
    assert [entry["piece"] for entry in told if isinstance(entry["piece"], list)]
    plain = client.post("/tokenize", json={"content": text, "parse_special": False}).json()
    assert len(plain["tokens"]) > len(told)
    for tokens in ([entry["id"] for entry in told], plain["tokens"]):
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    assert refused(client, "/detokenize", tokens=[10**6])
    assert refused(client, "/tokenize", content={"a": 1})


def test_pieces_of_a_long_text(client: httpx.Client) -> None:
    body = {"content": "a b " * 100_000, "with_pieces": True}
    assert "with_pieces" in refused(client, "/tokenize", **body)["message"]
    n = len(client.post("/tokenize", json={**body, "with_pieces": False}).json()["tokens"])
    assert n > 100_000
