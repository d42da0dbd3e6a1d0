"""The application: the routes of all APIs over its models, behind the checks that protect them."""

import time
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_local.server import embeddings, metrics, model_list, page
from dflash_local.server.answering.api_answer import RequestCheck
from dflash_local.server.anthropic import messages
from dflash_local.server.http import drain
from dflash_local.server.http.access_log import AccessLog
from dflash_local.server.http.bodies import BodyCheck
from dflash_local.server.http.drain import HEALTH_PATHS, Drain, DrainCheck
from dflash_local.server.http.errors import (
    ErrorBody,
    ErrorHandling,
    add_error_handlers,
    error_responses,
)
from dflash_local.server.http.security import (
    LOOPBACK_ORIGIN,
    KeyCheck,
    Prefix,
    SafeHeaders,
    SiteCheck,
    is_loopback,
)
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.llama import completion, props, tokenize
from dflash_local.server.metrics import Metrics
from dflash_local.server.models.library import Library
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.ollama import chat as ollama_chat
from dflash_local.server.ollama import model_list as ollama_model_list
from dflash_local.server.openai import chat, completions, responses
from dflash_local.version import version

MODULES = (
    *(page, drain, model_list, props, metrics, chat, completions, responses, messages, ollama_chat),
    *(ollama_model_list, completion, tokenize, embeddings),
)
"""Those that have routes."""


def create_app(pool: ModelPool, settings: ServerSettings) -> FastAPI:
    """An application that answers with the models of `pool`. The caller closes the pool.

    /openapi.json describes it, and /docs is for people. FastAPI's own pages are off: they load
    scripts from elsewhere.
    """
    app = FastAPI(
        title="dflash-local",
        version=version(),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        servers=[{"url": settings.api_prefix}] if settings.api_prefix else None,
    )
    app.state.pool = pool
    app.state.library = Library(
        pool, pool.further if settings.is_local or is_loopback(settings.host) else None
    )
    app.state.drain = Drain()
    app.state.metrics = Metrics(pool)
    app.state.request_check = RequestCheck(settings.strict)
    app.state.created = int(time.time())

    def description() -> JSONResponse:  # takes hundreds of milliseconds at first: on no event loop
        return JSONResponse(app.openapi())

    app.add_api_route("/openapi.json", description, include_in_schema=False)
    app.state.settings = settings
    for module in MODULES:
        if module is not page or settings.page:
            app.include_router(module.router, responses=error_responses(ErrorBody))
    add_error_handlers(app)
    _add_checks(app, settings)
    return app


def _add_checks(app: FastAPI, settings: ServerSettings) -> None:
    """Put the checks around the routes. The last one is outermost: requests meet it first. All of
    them are for HTTP; the server has neither websockets nor a lifespan."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyCheck, settings=settings)
    app.add_middleware(KeyCheck, settings=settings, open_paths=HEALTH_PATHS | page.PATHS)
    app.add_middleware(DrainCheck, drain=app.state.drain)
    app.add_middleware(ErrorHandling)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_origin_regex=LOOPBACK_ORIGIN,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("Retry-After",),
    )
    app.add_middleware(SiteCheck, settings=settings, linked_paths=page.PATHS)
    if settings.api_prefix:
        app.add_middleware(Prefix, prefix=settings.api_prefix)
    app.add_middleware(ErrorHandling)
    app.add_middleware(SafeHeaders)
    app.add_middleware(AccessLog, on_end=app.state.metrics.count_request)


@dataclass(frozen=True)
class HeadAsGet:
    """Middleware that answers HEAD as GET; uvicorn leaves the body out."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)
