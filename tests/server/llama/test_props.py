"""`/props`: what is served."""

import re

import httpx


def test_props_tell_what_is_served(client: httpx.Client) -> None:
    props = client.get("/props").json()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] > 0
    assert props["model_path"] == "tiny-coder-q8_0.gguf"
    assert "messages" in props["chat_template"]
    assert re.match(r"dflash-local \d.*llama\.cpp", props["build_info"])
