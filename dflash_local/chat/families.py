"""Which dialect a model speaks, told from its chat template."""

from __future__ import annotations

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.hermes import Hermes
from dflash_local.chat.plain import Plain


def dialect_of(template: str | None, architecture: str | None = None) -> Dialect:
    """The dialect whose marks `template` writes; `architecture` is asked where there is none."""
    text = template or ""
    thinking = "<think>" in text or "</think>" in text
    if "<tool_call>" in text and "<arg_key>" not in text:
        return Hermes(thinking)
    return Plain(thinking)
