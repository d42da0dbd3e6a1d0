"""The pages: `/`, to chat with the model and to watch it draft, and `/docs`, which tells people the
routes. Their files are in this folder."""

from pathlib import Path, PurePath

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

from dflash_local.server.http.errors import ApiError

_FOLDER = Path(__file__).parent
_FILES = StaticFiles(directory=_FOLDER, follow_symlink=True)
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


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return await _answer(request, "index.html")


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The routes that can be called, with examples."""
    return await _answer(request, "docs.html")


@router.get("/page/{name:path}")
async def part(request: Request, name: str) -> Response:
    """One of the page's files."""
    if name not in _NAMES:
        raise ApiError(404, "the page has no such file", code="not_found")
    return await _answer(request, name)


async def _answer(request: Request, name: str) -> Response:
    response = await _FILES.get_response(name, request.scope)
    response.headers.update(HEADERS)
    # The system's own table of types may have others.
    response.headers["Content-Type"] = _TYPES[PurePath(name).suffix]
    return response
