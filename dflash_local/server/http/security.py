"""The clients that are answered: pages and programs of this machine, and holders of a key.

A page of any website can send requests to a server on its visitor's machine. Two headers give them
away: Origin; and Host, where the website's own name was made to point to this machine (DNS
rebinding). Parts that a page merely shows, such as an image, have no Origin, but Sec-Fetch-Site.
All are refused before any work is done. The checks are plain ASGI, so that streams and a client's
disconnect pass through unchanged.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Set
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_local.errors import InputError
from dflash_local.server.http.errors import ApiError
from dflash_local.server.http.settings import ServerSettings

LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
"""The Origin header of this machine's own pages, from any port."""

client: ContextVar[str] = ContextVar("client", default="")
"""The client that is being answered: a digest of its key. Without keys all are one client."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(:\d{1,5})?")


def check_exposure(settings: ServerSettings) -> None:
    """Refuse to serve other machines, or all websites, without a key. Raises InputError."""
    if settings.is_local:  # its file says who may use it
        return
    if not _addresses(settings.host):
        raise InputError(
            f"--host {settings.host} is no address of this machine: take 127.0.0.1 for this "
            "machine alone, or 0.0.0.0 for all"
        )
    if settings.api_keys:
        return
    if not is_loopback(settings.host):
        raise InputError(
            f"--host {settings.host} lets other machines in, and no key is set: add --api-key-file "
            "FILE (or --api-key, or DFLASH_LOCAL_API_KEY), or leave out --host to serve this "
            "machine alone"
        )
    if "*" in settings.cors_origins:
        raise InputError(
            "--cors-origin '*' lets any website use this server, and no key is set: name the "
            "origins, or add --api-key-file FILE"
        )


class SiteCheck:
    """Middleware that refuses requests that call the server by a name that is not its own, and
    those from pages of other origins than this machine's, the server's own and the allowed ones. A
    link of any website may lead to `linked_paths`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, linked_paths: Set[str]) -> None:
        self._app = app
        self._linked_paths = linked_paths
        self._allowed = frozenset(settings.cors_origins)
        self._loopback = re.compile(LOOPBACK_ORIGIN)
        self._names = frozenset(
            name.lower().strip("[]")
            for name in (*_LOOPBACK, settings.host, *settings.allowed_hosts)
        )
        # A website's name is never an address: where other machines may call, any address will do.
        self._any_address = not (settings.is_local or is_loopback(settings.host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if not self._is_ours(headers.getlist("host")):
            raise ApiError(
                403,
                "the Host header is missing or names another host; call this server by its own "
                "name, or start it with --allowed-host NAME",
                code="host_not_allowed",
            )
        origins, own = headers.getlist("origin"), headers["host"].lower()
        # Browsers add Origin where a page could read the answer, and Sec-Fetch-Site always.
        unnamed = not origins and headers.get("sec-fetch-site") == "cross-site"
        known = all(self._is_allowed(origin, own) for origin in origins) and not unnamed
        if not known and not (unnamed and scope["path"] in self._linked_paths):
            raise ApiError(
                403,
                "pages of this origin may not use this server; start it with --cors-origin ORIGIN "
                "to allow one",
                code="origin_not_allowed",
            )
        await self._app(scope, receive, send)

    def _is_ours(self, given: list[str]) -> bool:
        match = _HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
        if match is None:
            return False
        name = match[1].strip("[]")
        return name in self._names or (self._any_address and _is_address(name))

    def _is_allowed(self, origin: str, own: str) -> bool:
        known = origin in self._allowed or "*" in self._allowed
        known = known or origin in (f"http://{own}", f"https://{own}")
        return known or self._loopback.fullmatch(origin) is not None


@dataclass(frozen=True)
class Prefix:
    """Middleware that takes `prefix` from the paths of requests, and knows no other paths."""

    app: ASGIApp
    prefix: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, prefix = scope["path"], self.prefix
        if path == prefix:  # the page's own addresses are relative to a folder
            await RedirectResponse(f"{prefix}/")(scope, receive, send)
        elif path.startswith(f"{prefix}/"):
            await self.app({**scope, "path": path[len(prefix) :]}, receive, send)
        else:
            raise ApiError(404, f"all paths begin with {prefix}", code="not_found")


@dataclass(frozen=True)
class SafeHeaders:
    """Middleware that tells browsers to take no answer for a script, an image or the like, and to
    show none in pages of other origins."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("X-Content-Type-Options", "nosniff")
                headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
            await send(message)

        await self.app(scope, receive, add)


class KeyCheck:
    """Middleware that asks for one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`,
    except for `open_paths`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, open_paths: Set[str]) -> None:
        self._app = app
        self._open_paths = open_paths
        self._keys = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            bearers = [value.partition(" ") for value in headers.getlist("authorization")]
            given = [key.strip() for scheme, _, key in bearers if scheme.lower() == "bearer"]
            digests = [_digest(key) for key in given + headers.getlist("x-api-key")]
            # Each is compared with all, so that the time tells nothing about how much was right.
            known = [b for a in digests for b in self._keys if hmac.compare_digest(a, b)]
            if not known:
                raise ApiError(
                    401,
                    "a key is needed, and none or a wrong one was given; send it as "
                    "'Authorization: Bearer KEY'",
                    # OpenAI's type at its routes, llama-server's at the others.
                    type="invalid_request_error"
                    if scope["path"].startswith("/v1/")
                    else "authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            client.set(known[0].hex())
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach a server that listens on `host`."""
    found = _addresses(host)
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


def _addresses(host: str) -> list[str | int]:
    try:
        return [entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
