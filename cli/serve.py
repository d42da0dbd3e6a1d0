"""`dflash-local serve`: the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_local.errors import InputError

from . import interrupt
from .loading import check_files, chosen_files
from .options import DRAFT_WIDTH, FILES, LOADING, SectionedCommand, option, values_of
from .prompt_text import read_text
from .report import Say, speaker
from .values import WholeText, api_key, host_name, number, web_origin, whole

if TYPE_CHECKING:
    from dflash_local.server.model_source import ModelSource
    from dflash_local.server.settings import Settings

LISTENING = (
    option(
        "--host",
        type=host_name,
        metavar="ADDRESS",
        default="127.0.0.1",
        help="Address to listen on. One that other machines reach needs a key.",
    ),
    option(
        "--port",
        type=whole(0, 65535),
        metavar="N",
        default=8080,
        help="Port to listen on, llama-server's by default; 0 takes a free one.",
    ),
)

ACCESS = (
    option(
        "--api-key",
        "api_keys",
        type=api_key,
        multiple=True,
        metavar="KEY",
        help="A key that requests have to bring; may be repeated. Other users of this machine see "
        "what is on its command lines: better take the variable, or a file.",
    ),
    option(
        "--api-key-file",
        type=click.Path(exists=True, dir_okay=False, readable=True),
        metavar="FILE",
        help="A file of keys, one per line.",
    ),
    option(
        "--cors-origin",
        "cors_origins",
        type=web_origin,
        multiple=True,
        metavar="ORIGIN",
        help="A web origin whose pages may use this server, such as https://chat.example, beside "
        "this machine's own; may be repeated.",
    ),
    option(
        "--allowed-host",
        "allowed_hosts",
        type=host_name,
        multiple=True,
        metavar="NAME",
        help="A name by which this server may be called, beside localhost and --host; may be "
        "repeated.",
    ),
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
    option(
        "--queue",
        "max_queue",
        type=whole(0, 100_000),
        metavar="N",
        default=64,
        help="Requests that may wait for their turn; further ones are answered 429.",
    ),
    option(
        "--queue-timeout",
        "queue_timeout_s",
        type=number(0, 86400, above=True),
        metavar="SECONDS",
        default=300.0,
        help="What waits longer is answered 503.",
    ),
    option(
        "--alias",
        type=WholeText(),
        metavar="NAME",
        help="The model's name in answers; its file's by default.",
    ),
    DRAFT_WIDTH,
)

CACHE = (
    option(
        "--cache-mb",
        type=whole(0, 1 << 24),
        metavar="N",
        default=1024,
        help="MiB of host memory for prompts and answers that had to leave their slot, so that who "
        "comes back to them does not wait again; 0 keeps none.",
    ),
    option(
        "--cache-dir",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help="A folder that takes as many MiB again, and outlives the server. What is in it can be "
        "read as text by those who can read the folder.",
    ),
)

SECTIONS = {
    "Model": FILES,
    "Address": LISTENING,
    "Access": ACCESS,
    "Requests": SERVING,
    "Cache": CACHE,
    "Machine": LOADING,
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> None:
    """Answer editors and programs over HTTP, as OpenAI's API and llama-server do.

    Without options the shipped pair is served, to this machine alone. SIGTERM lets running answers
    finish; Ctrl-C ends at once.
    """
    check_files(values)
    say = speaker(False)
    from dflash_local.server import lifecycle
    from dflash_local.server.model_pool import ModelPool

    settings = _settings(values)
    lifecycle.check_exposure(settings)
    # Before the model is loaded, which may take a minute: a bad address is told at once.
    with lifecycle.bind(settings) as bound:
        source = _single(values, say)
        pool = ModelPool([source], queue_timeout_s=values["queue_timeout_s"])
        with interrupt.ending():
            pool.adopt(source.load())
        ctx.exit(lifecycle.serve(pool, settings, bound, say))


def _single(values: Mapping[str, Any], say: Say) -> ModelSource:
    """The one model of --target, or of the shipped pair."""
    from dflash_local.server.model_source import ModelSource

    target, draft = chosen_files(values, say)
    return ModelSource(
        values["alias"] or target.stem,
        target,
        draft,
        {**values_of((*LOADING, *CACHE), values), "n_seq": values["n_seq"]},
        values["draft_width"],
        values["max_queue"],
    )


def _settings(values: Mapping[str, Any]) -> Settings:
    from dflash_local.server.settings import Settings

    given = values_of((*LISTENING, *ACCESS, *SERVING), values)
    keys = list(given.pop("api_keys"))
    path = given.pop("api_key_file", None)
    if path is not None:
        lines = read_text(Path(path)).lstrip("\ufeff").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise InputError(f"--api-key-file {path} holds no key: write one per line")
        keys += map(api_key, found)
    for name in ("n_seq", "max_queue", "queue_timeout_s", "draft_width", "alias"):
        given.pop(name, None)
    return Settings(api_keys=tuple(keys), **given)
