"""`dflash-local serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import click

from .loading import check_files, load_model
from .options import FILES, LOADING, SectionedCommand, option
from .report import speaker
from .values import whole

LISTENING = (
    option("--host", metavar="ADDRESS", default="127.0.0.1", help="Address to listen on."),
    option("--port", type=whole(0, 65535), metavar="N", default=8080, help="0 takes a free one."),
)
SERVING = (
    option(
        "--parallel",
        "n_seq",
        type=whole(1, 64),
        metavar="N",
        default=4,
        help="Requests answered at once; they share the context.",
    ),
)

SECTIONS = {"Model": FILES, "Address": LISTENING, "Requests": SERVING, "Machine": LOADING}


@click.command(cls=SectionedCommand, sections=SECTIONS)
def serve(**values: Any) -> None:
    """Answer editors and programs over HTTP, as OpenAI's API does."""
    check_files(values)
    say = speaker(False)
    import uvicorn

    from dflash_local.server.app import create_app
    from dflash_local.server.settings import Settings

    with load_model({**values, "quiet": False}, say, n_seq=values["n_seq"]) as model:
        settings = Settings(host=values["host"], port=values["port"])
        uvicorn.run(create_app(model, settings), host=settings.host, port=settings.port)
