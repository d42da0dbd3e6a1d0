"""The application: routes of every API over one model."""

from __future__ import annotations

import time

from fastapi import FastAPI

import dflash_local
from dflash_local.model import Model
from dflash_local.server import health, models
from dflash_local.server.drain import Drain
from dflash_local.server.errors import add_error_handlers
from dflash_local.server.settings import Settings

ROUTERS = (health.router, models.router)


def create_app(model: Model, settings: Settings) -> FastAPI:
    """An application that answers with `model`, which stays the caller's to close.

    What it describes at /openapi.json has no page of its own: that would load scripts from afar.
    """
    app = FastAPI(
        title="dflash-local",
        version=dflash_local.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.model = model
    app.state.settings = settings
    app.state.drain = Drain()
    app.state.created = int(time.time())
    for router in ROUTERS:
        app.include_router(router)
    add_error_handlers(app)
    return app
