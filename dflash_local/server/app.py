"""The application: routes of every API over its models, behind what keeps them safe."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import dflash_local
from dflash_local.server import metrics, page
from dflash_local.server import model_list as models
from dflash_local.server.anthropic import messages as anthropic
from dflash_local.server.http import health
from dflash_local.server.http.access_log import AccessLog
from dflash_local.server.http.bodies import BodyCheck
from dflash_local.server.http.drain import Drain, DrainCheck
from dflash_local.server.http.errors import RESPONSES, Failures, add_error_handlers
from dflash_local.server.http.security import (
    LOOPBACK_ORIGIN,
    OPEN_PATHS,
    HostCheck,
    KeyCheck,
    OriginCheck,
)
from dflash_local.server.http.settings import Settings
from dflash_local.server.llama import apply_template, completion, infill, props, slots, tokenize
from dflash_local.server.metrics import Metrics
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.ollama import chat as ollama
from dflash_local.server.ollama import model_list as ollama_models
from dflash_local.server.openai import chat, completions, responses

ROUTERS = (
    page.router,
    health.router,
    models.router,
    props.router,
    slots.router,
    metrics.router,
    chat.router,
    completions.router,
    responses.router,
    anthropic.router,
    ollama.router,
    ollama_models.router,
    completion.router,
    infill.router,
    tokenize.router,
    apply_template.router,
)


def create_app(pool: ModelPool, settings: Settings) -> FastAPI:
    """An application that answers with the models of `pool`, which stays the caller's to close.

    What it describes at /openapi.json has no page of its own: that would load scripts from afar.
    """
    app = FastAPI(
        title="dflash-local",
        version=dflash_local.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.pool = pool
    app.state.settings = settings
    app.state.drain = Drain()
    app.state.metrics = Metrics(pool)
    app.state.told_of_infill = set()
    app.state.created = int(time.time())
    for router in ROUTERS:
        app.include_router(router, responses=RESPONSES)
    add_error_handlers(app)
    _guard(app, settings)
    return app


def _guard(app: FastAPI, settings: Settings) -> None:
    """Put the checks around the routes, the last one, which a request meets first, outermost."""
    app.add_middleware(BodyCheck, settings=settings)
    app.add_middleware(KeyCheck, settings=settings, open_paths=OPEN_PATHS | page.PATHS)
    app.add_middleware(DrainCheck, drain=app.state.drain)
    app.add_middleware(Failures)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_origin_regex=LOOPBACK_ORIGIN,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("Retry-After",),
    )
    app.add_middleware(OriginCheck, settings=settings)
    app.add_middleware(HostCheck, settings=settings)
    app.add_middleware(AccessLog, metrics=app.state.metrics)
