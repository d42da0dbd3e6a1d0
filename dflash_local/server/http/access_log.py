"""A line on stderr for each request: client, route, status, time and tokens.

It holds nothing of a prompt or a query, and no control character, whatever a client sends.
"""

import logging
import sys
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_local.result import Result

log = logging.getLogger("dflash_local.server.access")

ModelResult = tuple[str, Result]
"""A finished answer, with the name of its model."""

# What generates for a request runs in a task of that request, and so sees the request's own list.
_results: ContextVar[list[ModelResult] | None] = ContextVar("results", default=None)
_reason: ContextVar[list[str] | None] = ContextVar("reason", default=None)
_MAX_PATH = 200
_MAX_REASON = 120


def record_result(model_name: str, result: Result) -> None:
    """Note an answer for the log line of the request that this task belongs to, if there is one."""
    results = _results.get()
    if results is not None:
        results.append((model_name, result))


def record_reason(text: str) -> None:
    """Note why the request that this task belongs to was refused: nothing that may be a prompt."""
    reason = _reason.get()
    if reason is not None:
        reason[:] = [text]


@dataclass(frozen=True)
class AccessLog:
    """Middleware that logs requests when they end. `on_end` gets the status of each, 0 if the
    client left before an answer, and the results that were generated for it."""

    app: ASGIApp
    on_end: Callable[[int, Sequence[ModelResult]], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        results: list[ModelResult] = []
        _results.set(results)
        reason: list[str] = []
        _reason.set(reason)
        status = 0
        complete = False

        async def watch(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self.app(scope, receive, watch)
        finally:
            self.on_end(status, results)
            log.info(
                "%s %s %s %s%s %.0f ms%s%s",
                (scope.get("client") or ("-",))[0],
                _printable(scope["method"]),
                _printable(scope["path"]),
                status or "unanswered",
                "" if complete else " broken off",
                1000 * (time.monotonic() - start),
                _token_counts(results),
                "".join(f": {_printable(text, _MAX_REASON)}" for text in reason),
            )


def log_to_stderr() -> None:
    """Send the logs of the server, uvicorn and asyncio to stderr, as plain lines."""
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
    """Nothing that a client sends can begin a line or control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(_printable(line, None) for line in super().format(record).splitlines())


def _is_cancellation(record: logging.LogRecord) -> bool:
    """That the end of the server cancels requests is not worth a line."""
    kind: Any = record.exc_info[0] if record.exc_info else None
    return kind is not None and issubclass(kind, CancelledError)


def _printable(text: str, limit: int | None = _MAX_PATH) -> str:
    shown = text[:limit]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def _token_counts(results: Sequence[ModelResult]) -> str:
    """Tokens of the prompts, of which one with several answers counts for each, and of the
    answers."""
    if not results:
        return ""
    n_prompt = sum(result.stats.prompt_tokens for _, result in results)
    n_emitted = sum(len(result.tokens) for _, result in results)
    return f" {n_prompt}+{n_emitted} tokens"
