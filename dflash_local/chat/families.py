"""Which dialect a model speaks, told from its chat template."""

from __future__ import annotations

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.harmony import Harmony
from dflash_local.chat.hermes import Hermes
from dflash_local.chat.llama31 import Llama31
from dflash_local.chat.plain import Plain
from dflash_local.chat.qwen_coder import QwenCoder


def dialect_of(template: str | None, architecture: str | None = None) -> Dialect:
    """The dialect whose marks `template` writes; `architecture` is asked where there is none."""
    text = template or ""
    thinking = "<think>" in text or "</think>" in text
    if all(mark in text for mark in ("<|start|>", "<|channel|>", "<|message|>")):
        return Harmony()
    if "<tool_call>" in text and "<function=" in text and "<parameter=" in text:
        return QwenCoder(thinking)
    if "<tool_call>" in text and '"arguments' in text.replace("\\", ""):
        return Hermes(thinking)
    if "<|start_header_id|>" in text and '"parameters"' in text.replace("\\", ""):
        return Llama31()
    if not template and architecture == "gpt-oss":
        return Harmony()
    return Plain(thinking)
