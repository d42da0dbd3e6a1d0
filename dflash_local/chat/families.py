"""Which dialect a model speaks."""

from __future__ import annotations

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.dialects.harmony import Harmony
from dflash_local.chat.dialects.hermes import Hermes
from dflash_local.chat.dialects.llama31 import Llama31
from dflash_local.chat.dialects.plain import Plain
from dflash_local.chat.dialects.qwen_coder import QwenCoder

DIALECTS: tuple[type[Dialect], ...] = (Harmony, QwenCoder, Hermes, Llama31, Plain)
"""All dialects in the order in which they are tried: `Plain` takes any model."""


def dialect_of(template: str | None) -> Dialect:
    """The dialect of a model with this chat template, None for a model without one."""
    found = (dialect.of(template or "") for dialect in DIALECTS)
    return next(dialect for dialect in found if dialect is not None)
