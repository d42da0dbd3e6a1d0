"""Who is answered: only this machine's pages and programs, and those who know a key.

A page of any website can send requests to a server on its visitor's machine. Two things tell such
requests: their Origin header; and, where the website's own name was made to lead here (DNS
rebinding), a Host header that is none of ours. Both are refused before any work. Pure ASGI: what
streams passes through unchanged, a client's disconnect too.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Set

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_local.server.http.errors import ApiError
from dflash_local.server.http.settings import LOOPBACK, Settings

LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
"""What the Origin header of this machine's own pages looks like, whatever port they are from."""

OPEN_PATHS = frozenset({"/health", "/v1/health"})
"""What is answered without a key: whether the server is there."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(:\d{1,5})?")


class HostCheck:
    """Refuses requests that call the server by a name that is not its own."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._names = frozenset(
            name.lower().strip("[]") for name in (*LOOPBACK, settings.host, *settings.allowed_hosts)
        )
        # Nobody else's name can be an address: where others may call at all, any address will do.
        self._any_address = not is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_ours(Headers(scope=scope).getlist("host")):
            error = ApiError(
                403,
                "the Host header is missing or names another host; call this server by its own "
                "name, or start it with --allowed-host NAME",
                code="host_not_allowed",
            )
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_ours(self, given: list[str]) -> bool:
        match = _HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
        if match is None:
            return False
        name = match[1].strip("[]")
        return name in self._names or (self._any_address and _is_address(name))


class OriginCheck:
    """Refuses requests from pages of other origins than this machine's, the server's own and those
    allowed. It stands behind `HostCheck`, which vouches for the name that is the server's own."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._allowed = frozenset(settings.cors_origins)
        self._loopback = re.compile(LOOPBACK_ORIGIN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origins, own = headers.getlist("origin"), headers.get("host", "").lower()
        if all(self._is_allowed(origin, own) for origin in origins):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            "pages of this origin may not use this server; start it with --cors-origin ORIGIN to "
            "allow one",
            code="origin_not_allowed",
        )
        await error.response(scope)(scope, receive, send)

    def _is_allowed(self, origin: str, own: str) -> bool:
        known = origin in self._allowed or "*" in self._allowed
        known = known or origin in (f"http://{own}", f"https://{own}")
        return known or self._loopback.fullmatch(origin) is not None


class KeyCheck:
    """Asks for one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`."""

    def __init__(self, app: ASGIApp, settings: Settings, open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = open_paths
        self._keys = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and self._keys and scope["path"] not in self._open_paths
        if asked and not self._knows(_given_keys(Headers(scope=scope))):
            raise ApiError(
                401,
                "a key is needed, and none or a wrong one was given; send it as "
                "'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)

    def _knows(self, given: Iterable[str]) -> bool:
        # Each is compared with all, so that the time taken tells neither which nor how much of it.
        digests = [_digest(key) for key in given]
        return any([hmac.compare_digest(a, b) for a in digests for b in self._keys])


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is out of other machines' reach."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _given_keys(headers: Headers) -> list[str]:
    bearers = [value.partition(" ") for value in headers.getlist("authorization")]
    keys = [key.strip() for scheme, _, key in bearers if scheme.lower() == "bearer"]
    return keys + headers.getlist("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
