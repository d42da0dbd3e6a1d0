"""`dflash-local ps`: what a running server has loaded."""

import json
import re
from typing import Any

import click

from .answer import write_json, write_stdout
from .list import gigabytes
from .options import JSON, Option, SectionedCommand
from .report import table
from .values import api_key

URL = "http://127.0.0.1:8080"
SECTIONS = {
    "Server": (
        Option("--url URL", "Where the server listens.", default=URL),
        Option("--api-key KEY", "A key that it asks for.", type=api_key),
    ),
    "Output": (JSON,),
}
_PATIENCE_S = 10
_NEVER = "9999"
"""The year that Ollama's API has for a model that stays."""


@click.command(cls=SectionedCommand, sections=SECTIONS)
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """List the models that a running server has loaded.

    The server is one that `dflash-local serve` started.
    """
    models = _running(url, api_key)
    if as_json:
        write_json({"models": models})
        return
    rows = [
        (
            each["name"],
            gigabytes(each["size"]),
            "GPU" if each["size_vram"] else "CPU",
            each["context_length"],
            _until(each["expires_at"]),
        )
        for each in models
    ]
    heads = ("name", "size", "on", "context", "until")
    write_stdout(table(rows, heads) + "\n")


def _until(expires_at: str) -> str:
    never = expires_at.startswith(_NEVER)
    return "the server ends" if never else expires_at.replace("T", " ")[:19]


def check_url(option: str, url: str) -> None:
    """Refuse what is no address of a server. Raises click.UsageError."""
    if not re.match(r"https?://[^/]", url):
        raise click.UsageError(f"{option} {url}: expected an address such as {URL}.")


def fetched(url: str, path: str, key: str | None = None) -> Any:
    """The JSON that a server answers. Raises what `urllib` raises, and ValueError."""
    import urllib.request
    from http.client import HTTPException

    # Without the proxies of the environment: the server is on this machine or beside it.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers)
    try:
        with direct.open(request, timeout=_PATIENCE_S) as answer:
            return json.load(answer)
    except HTTPException as error:
        raise OSError(str(error) or type(error).__name__) from None


def _running(url: str, key: str | None) -> list[dict[str, Any]]:
    check_url("--url", url)
    try:
        found: list[dict[str, Any]] = fetched(url, "/api/ps", key)["models"]
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        if code := getattr(error, "code", None):  # an HTTPError
            hint = "give a key with --api-key" if code == 401 else "it is none of this program"
            raise click.UsageError(f"the server at {url} answered {code}: {hint}.") from None
        reason = getattr(error, "reason", error)
        raise click.UsageError(
            f"no server answers at {url} ({reason}): start one with `dflash-local serve`."
        ) from None
