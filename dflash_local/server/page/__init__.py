"""The pages: `/`, to chat with the model and to watch it draft, and `/docs`, which tells people the
routes. Their files are in this folder."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from dflash_local.server.http.errors import ApiError

_FOLDER = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAMES = frozenset(
    path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*") if path.suffix in _TYPES
)
PATHS = frozenset({"/", "/docs", *(f"/page/{name}" for name in _NAMES)})
"""Paths served without a key: nothing in these files is secret, and the page asks for the key."""

HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # The browser refuses to turn any text into markup or a script, whatever a model writes.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return _answer(request, _file("index.html"))


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The routes that can be called, with examples."""
    return _answer(request, _file("docs.html"))


@router.get("/page/{name:path}")
async def part(request: Request, name: str) -> Response:
    """One of the page's files."""
    if name not in _NAMES:
        raise ApiError(404, "the page has no such file", code="not_found")
    return _answer(request, _file(name))


def _answer(request: Request, file: _File) -> Response:
    headers = {**HEADERS, "ETag": file.etag}
    known = request.headers.get("if-none-match", "")
    if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


@cache
def _file(name: str) -> _File:
    path = _FOLDER / name
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return _File(content, _TYPES[path.suffix], f'"{digest[:32]}"')
