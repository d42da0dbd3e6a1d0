"""`/tokenize` and `/detokenize`, as clients count tokens with them."""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import httpx

from dflash_local import Model
from server_process import ServerProcess


def test_tokens_and_text(client: httpx.Client, model: Model) -> None:
    text = "naïve <|im_end|> = 1"
    told = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [entry["id"] for entry in told] == model.tokenize(text)
    assert [entry["piece"] for entry in told if isinstance(entry["piece"], list)]
    plain = client.post("/tokenize", json={"content": text, "parse_special": False}).json()
    assert len(plain["tokens"]) > len(told)
    for tokens in ([entry["id"] for entry in told], plain["tokens"]):
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}


def test_a_long_text(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"content": "a b " * 100_000, "with_pieces": False})
    assert len(answer.json()["tokens"]) > 100_000


def test_whoever_tokenises_much_delays_no_answer(server: ServerProcess) -> None:
    """As many as the server has threads for everything else, with a quarter of a megabyte each. An
    answer that waited for them would come after nearly all of theirs."""
    names = {"content": "<|im_start|>" * 20_000}
    with server.client() as client, ThreadPoolExecutor(45) as others:
        answers = [others.submit(client.post, "/tokenize", json=names) for _ in range(45)]

        def n_done() -> int:
            return sum(answer.done() for answer in answers)

        wait(answers, return_when=FIRST_COMPLETED)
        before = n_done()
        client.post("/v1/completions", json={"prompt": "def", "max_tokens": 1}).raise_for_status()
        assert n_done() - before < 20 and n_done() < 45
        assert all(len(answer.result().json()["tokens"]) == 20_000 for answer in answers)
