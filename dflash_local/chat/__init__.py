"""What lies between messages and the text that a model continues, and between its text and them."""

from __future__ import annotations

from dflash_local.chat.dialect import Dialect, Parser
from dflash_local.chat.families import dialect_of
from dflash_local.chat.template import ChatTemplate
from dflash_local.chat.tool import Tool

__all__ = ["ChatTemplate", "Dialect", "Parser", "Tool", "dialect_of"]
