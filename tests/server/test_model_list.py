"""`/v1/models` and `/props`: what is served, and the names that requests may give."""

import re

import httpx
import pytest


def test_the_model_is_listed_and_found(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (entry,) = listed["data"]
    assert entry["id"] == "tiny-coder-q8_0"
    assert (entry["object"], entry["owned_by"]) == ("model", "dflash-local")
    assert client.get("/v1/models/tiny-coder-q8_0").json() == entry


@pytest.mark.parametrize("name", ["gpt-4", "a/b", "../secrets", "x" * 5000, "%2e%2e%2f", "\u00e9"])
def test_another_model_is_not_found(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    told = answer.json()["error"]
    assert told["code"] in ("model_not_found", "not_found")
    assert len(told["message"]) < 400


def test_props_tell_what_is_served(client: httpx.Client) -> None:
    props = client.get("/props").json()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] > 0
    assert props["model_path"] == "tiny-coder-q8_0.gguf"
    assert props["modalities"]["vision"] is False
    assert "messages" in props["chat_template"]
    assert re.match(r"dflash-local \d.*llama\.cpp", props["build_info"])
