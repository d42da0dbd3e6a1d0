"""Errors for whatever goes wrong, never with a traceback: in OpenAI's words, or in those of the API
that a request is to."""

from __future__ import annotations

import logging
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_local.errors import (
    ClosedError,
    ContextFullError,
    InputError,
    QueueFullError,
    QueueTimeoutError,
)

log = logging.getLogger("dflash_local.server")

REFUSED = "refused"
"""The type of a `PydanticCustomError` whose line says all there is to say."""

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60


class ErrorDetail(BaseModel):
    """What is wrong, of which kind, in which field, and a word for it that programs can go by."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused, and why."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer it now, or failed."},
}
"""What /openapi.json says of errors, for every route."""


class ApiError(Exception):
    """An answer that is an error: `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": told}

    def response(self, scope: Scope) -> JSONResponse:
        """The answer to the request of `scope`, in the words of its API."""
        status, body = form_of(scope)(self)
        return JSONResponse(body, status, headers=self.headers)


ErrorForm = Callable[[ApiError], tuple[int, dict[str, Any]]]
"""Status and body of an error, as one API has them."""

_FORMS_OF_PATHS: dict[str, ErrorForm] = {}
_FORMS_OF_HEADERS: dict[str, ErrorForm] = {}


def error_form(*paths: str, header: str | None = None) -> Callable[[ErrorForm], ErrorForm]:
    """Word errors of requests to `paths`, and to what lies below them, by the decorated function;
    those of requests with `header`, whatever their path, too."""

    def register(form: ErrorForm) -> ErrorForm:
        _FORMS_OF_PATHS.update(dict.fromkeys(paths, form))
        if header is not None:
            _FORMS_OF_HEADERS[header] = form
        return form

    return register


def form_of(scope: Scope) -> ErrorForm:
    """How errors of the request of `scope` are worded."""
    path = scope["path"]
    for prefix, form in _FORMS_OF_PATHS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return form
    headers = Headers(scope=scope)
    return next((form for name, form in _FORMS_OF_HEADERS.items() if name in headers), _openai)


def _openai(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, error.body()


def api_error(error: BaseException) -> ApiError:
    """What a client is told of `error`: of one that nobody foresaw nothing; the log has that."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return _http(error)
    if isinstance(error, ContextFullError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(
            429,
            str(error),
            type="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(error.retry_after)},
        )
    if isinstance(error, QueueTimeoutError):
        return unavailable(str(error), code="queue_timeout")
    if isinstance(error, ClosedError):
        return unavailable("the server is shutting down", code="shutting_down")
    log_crash(error)
    return ApiError(
        500,
        "the server failed at this request; its log says more",
        type="server_error",
        code="internal_error",
    )


def unavailable(message: str, *, code: str, retry_after_s: int = 5) -> ApiError:
    """503, with when to come back."""
    return ApiError(
        503,
        message,
        type="unavailable_error",
        code=code,
        headers={"Retry-After": str(retry_after_s)},
    )


def log_crash(error: BaseException) -> None:
    """Where an error came from, for the log; its own words may hold a piece of a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("a request failed with %s\n%s", type(error).__name__, frames.rstrip())


def add_error_handlers(app: FastAPI) -> None:
    """Answer the errors that FastAPI itself would answer in our words. `Failures` does so with all
    others."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response(request.scope)

    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


class Failures:
    """Answers what is raised inside of it, unless an answer has begun: that one is broken off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            answer = api_error(error)
            if not started:
                await answer.response(scope)(scope, receive, send)


def _http(error: HTTPException) -> ApiError:
    words = {
        404: "there is no such route here; /openapi.json lists those that there are",
        405: "this route does not take this method; /openapi.json lists the methods of each",
    }
    message = words.get(error.status_code) if error.detail == _phrase(error) else None
    return ApiError(
        error.status_code,
        message or str(error.detail),
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
        headers=error.headers,
    )


def _phrase(error: HTTPException) -> str:
    return HTTPStatus(error.status_code).phrase


def _invalid(error: RequestValidationError) -> ApiError:
    """The first fault of a body: where it is, what is wrong, what was given."""
    fault = error.errors()[0]
    kind, *location = fault["loc"]
    param = _path(error.body, location) if kind == "body" else ".".join(map(str, location))
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] not in ("missing", "value_error", REFUSED) and param:
        message = f"{message}, not {_SHOWN.repr(fault['input'])}"
    return ApiError(400, f"{param or 'the body'}: {message}", param=param)


def _path(body: Any, location: Sequence[Any]) -> str | None:
    """`messages[0].content`: a location without what only our types are called by."""
    path = ""
    for i, part in enumerate(location):
        if isinstance(body, dict) and isinstance(part, str) and part in body:
            body, path = body[part], f"{path}.{part}"
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body, path = body[part], f"{path}[{part}]"
        elif i == len(location) - 1 and isinstance(body, dict) and isinstance(part, str):
            path = f"{path}.{part}"  # what is missing
    return path.removeprefix(".")[:200] or None
