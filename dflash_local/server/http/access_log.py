"""A line on stderr for each request: who, what, how it ended, how long, how many tokens.

Nothing of a prompt or a query is in it, and no control character, whatever a client sends.
"""

from __future__ import annotations

import logging
import sys
import time
from asyncio import CancelledError
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_local.server.http.tally import Tally, open_tally
from dflash_local.server.metrics import Metrics

log = logging.getLogger("dflash_local.server.access")

_MAX_PATH = 200


class AccessLog:
    """Logs requests when they end, and counts them by status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        tally = open_tally()
        status = 0
        whole = False

        async def watch(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, watch)
        finally:
            self._metrics.count_response(status, tally.answers)
            log.info(
                "%s %s %s %s%s %.0f ms%s",
                (scope.get("client") or ("-",))[0],
                _plain(scope["method"]),
                _plain(scope["path"]),
                status or "unanswered",
                "" if whole else " broken off",
                1000 * (time.monotonic() - start),
                _tokens(tally),
            )


def log_to_stderr() -> None:
    """Send what the server and what is under it have to say to stderr, as plain lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainLines())
    handler.addFilter(lambda record: not _is_cancellation(record))
    for name, level in [
        ("dflash_local.server", logging.INFO),
        ("uvicorn", logging.WARNING),
        ("asyncio", logging.ERROR),
    ]:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


class _PlainLines(logging.Formatter):
    """No line is begun, and no terminal told anything, by what a client sent."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(_plain(line, None) for line in super().format(record).splitlines())


def _is_cancellation(record: logging.LogRecord) -> bool:
    """Requests that the server's end cut short are no news."""
    kind: Any = record.exc_info[0] if record.exc_info else None
    return kind is not None and issubclass(kind, CancelledError)


def _plain(text: str, limit: int | None = _MAX_PATH) -> str:
    shown = text[:limit]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def _tokens(tally: Tally) -> str:
    return f" {tally.n_prompt}+{tally.n_emitted} tokens" if tally.answers else ""
