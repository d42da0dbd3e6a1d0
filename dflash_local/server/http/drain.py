"""Draining: which requests run, and whether new ones are still accepted. `/health` says so."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_local.server.http.errors import unavailable

HEALTH_PATHS = frozenset({"/health", "/v1/health"})
"""These are always answered, and without a key."""

router = APIRouter()


class Drain:
    """Counts running requests; while draining, no new one begins. One event loop owns it."""

    def __init__(self) -> None:
        self.draining = False
        self.n_running = 0
        self.idle = asyncio.Event()
        """Set while no request runs."""
        self.idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        self.n_running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.n_running -= 1
            if not self.n_running:
                self.idle.set()


@dataclass(frozen=True)
class DrainCheck:
    """Middleware that refuses requests while the server drains, except to `HEALTH_PATHS`."""

    app: ASGIApp
    drain: Drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in (*HEALTH_PATHS, "/load"):
            await self.app(scope, receive, send)
            return
        if self.drain.draining:
            raise unavailable(
                "the server is shutting down and takes no new requests", code="shutting_down"
            )
        with self.drain.request():
            await self.app(scope, receive, send)


@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(request: Request) -> JSONResponse:
    """`{"status": "ok"}`; while the server drains, 503 and "draining"."""
    if request.app.state.drain.draining:
        return JSONResponse({"status": "draining"}, 503, headers={"Retry-After": "5"})
    return JSONResponse({"status": "ok"})


@router.get("/load", include_in_schema=False)
async def load(request: Request) -> dict[str, int]:
    """The number of requests that are being answered, in vLLM's form."""
    return {"server_load": request.app.state.drain.n_running}
