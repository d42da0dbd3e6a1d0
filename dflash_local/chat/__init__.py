"""What lies between messages and the text that a model continues."""

from __future__ import annotations

from dflash_local.chat.template import ChatTemplate

__all__ = ["ChatTemplate"]
