"""Conversations made ready for models of several families."""

from pathlib import Path

import pytest

import mini_pair
from chat_models import HELLO, WEATHER, with_template
from dflash_local import load
from dflash_local.chat.tool import Tool
from dflash_local.server.answering.chat import prepare_chat
from dflash_local.server.answering.tools import tool_use
from dflash_local.server.http.errors import ApiError


def test_an_answer_is_begun_where_plain_text_can_begin_it(tmp_path: Path) -> None:
    """Llama 3.1's answers are plain text, though its calls need the names of control tokens."""
    target = with_template(mini_pair.pair()[0], tmp_path / "llama.gguf", "llama31")
    with load(target, n_ctx=1024, n_gpu_layers=0, n_threads=1, quiet=True) as model:
        for tools in (None, tool_use([Tool.of(WEATHER)])):
            asked = prepare_chat(model, HELLO, tools=tools)
            begun = prepare_chat(model, HELLO, tools=tools, begun="def add")
            assert begun.prompt == asked.prompt + model.tokenize("def add")
            assert begun.bindings == asked.bindings == {"special": True}


def test_text_begins_no_answer_of_channels(tmp_path: Path) -> None:
    target = with_template(mini_pair.pair()[0], tmp_path / "gpt-oss.gguf", "harmony")
    with (
        load(target, n_ctx=1024, n_gpu_layers=0, n_threads=1, quiet=True) as model,
        pytest.raises(ApiError, match="only where it is free text"),
    ):
        prepare_chat(model, HELLO, begun="def add")
