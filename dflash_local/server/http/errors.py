"""Errors: any fault becomes one line in the form of the API that the request went to.

No client ever sees a traceback.
"""

import logging
import re
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import ErrorDetails
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_local.errors import (
    ClosedError,
    ContextFullError,
    InputError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    WorkerLostError,
)
from dflash_local.server.http.access_log import record_reason

log = logging.getLogger("dflash_local.server")

REFUSED = "refused"
"""The type of a `PydanticCustomError` whose message says everything."""

_PLAIN = re.compile(r"[\w .,;:()\[\]/<>=-]+")
_QUOTED = re.compile(r"['\"`]|, not ")

ANTHROPIC_PATH = "/v1/messages/"
ANTHROPIC_HEADER = "anthropic-version"
"""Every client of Anthropic's sends it, and no other client does."""

OLLAMA_PATH = "/api/"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}  # https://platform.claude.com/docs/en/api/errors

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60


class ErrorDetail(BaseModel):
    """An error: its message, kind and field, and a code for programs. For a prompt that is too long
    also its tokens and the context's."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every answer that is an error, and the last event of a stream that breaks."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaErrorBody(BaseModel):
    """The body of every answer that is an error, and the last line of a stream that breaks."""

    error: str


class ApiError(Exception):
    """An answer that is an error: `{"error": {"message", "type", "param", "code"}}`, and `numbers`
    beside these."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.numbers = dict(numbers or {})
        self.reason: str | None = message if _QUOTED.search(message) is None else param
        """For the log, without the message's quotes of a request."""

    def body(self) -> dict[str, Any]:
        """The JSON of the answer, in OpenAI's form."""
        fields = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": {**fields, **self.numbers}}

    def response(self, scope: Scope) -> JSONResponse:
        """The answer to the request of `scope`, in the form of its API."""
        status, body = error_of(self, scope)
        if self.reason and _PLAIN.fullmatch(self.reason):
            record_reason(self.reason)
        return JSONResponse(body, status, headers=self.headers)


bad_request = partial(ApiError, 400)


def error_of(error: ApiError, scope: Scope) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in the form of the API that the request of `scope` went to."""
    path = f"{scope['path']}/"
    if path.startswith(OLLAMA_PATH):
        return error.status, {"error": error.message}
    if path.startswith(ANTHROPIC_PATH) or ANTHROPIC_HEADER in Headers(scope=scope):
        return _anthropic(error)
    return error.status, error.body()


def _anthropic(error: ApiError) -> tuple[int, dict[str, Any]]:
    """A server that cannot answer now is overloaded, 529: Anthropic's clients try again then."""
    status = 529 if error.status == 503 else error.status
    default = "api_error" if status >= 500 else "invalid_request_error"
    message = error.message
    if error.code == "context_length_exceeded":
        # These words tell clients that it is time to shorten the conversation.
        message = f"prompt is too long: {message}"
    kind = _ANTHROPIC_TYPES.get(status, default)
    return status, {"type": "error", "error": {"type": kind, "message": message}}


def error_responses(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The entries of /openapi.json for errors that have such a body."""
    return {
        "4XX": {"model": body, "description": "The request is refused, and why."},
        "5XX": {"model": body, "description": "The server cannot answer now, or failed."},
    }


def check_switch(is_on: bool, option: str) -> None:
    """Raises ApiError for a route that is switched off by `option` of the command."""
    if not is_on:
        message = f"this server was started with {option}"
        raise ApiError(501, message, type="not_supported_error")


def unavailable(message: str, *, code: str) -> ApiError:
    """503, and when to try again."""
    return ApiError(503, message, type="unavailable_error", code=code, headers={"Retry-After": "5"})


def log_crash(error: BaseException) -> None:
    """Log where an error came from, but not its message, which may hold a piece of a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("a request failed with %s\n%s", type(error).__name__, frames.rstrip())


def add_error_handlers(app: FastAPI) -> None:
    """Write the errors that FastAPI would answer by itself in our form. `ErrorHandling` does so
    with all others."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response(request.scope)

    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


@dataclass(frozen=True)
class ErrorHandling:
    """Middleware that answers errors raised inside of it. An answer that has already begun is
    broken off."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            answer = api_error(error)
            # Errors and the frames that they came through hold each other, and some frames hold
            # pictures: the next look for such circles may be a hundred requests away.
            traceback.clear_frames(error.__traceback__)
            if not started:
                await answer.response(scope)(scope, receive, send)


def too_long(error: PromptTooLongError, message: str = "", param: str | None = None) -> ApiError:
    """In llama-server's words and with its type: agents know by them that it is time to shorten the
    conversation, and read the numbers. The code is OpenAI's."""
    n = f"at least {error.n_prompt_tokens}" if error.at_least else f"{error.n_prompt_tokens}"
    return ApiError(
        400,
        message
        or f"request ({n} tokens) exceeds the available context size ({error.n_ctx} tokens); "
        "shorten it, or start the server with a larger --ctx",
        type="exceed_context_size_error",
        param=param,
        code="context_length_exceeded",
        numbers={"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx},
    )


def _http(error: HTTPException) -> ApiError:
    messages = {
        404: "there is no such route; /openapi.json lists the routes",
        405: "this route does not take this method; /openapi.json lists the methods of each",
    }
    is_default = error.detail == HTTPStatus(error.status_code).phrase
    message = messages.get(error.status_code) if is_default else None
    return ApiError(
        error.status_code,
        message or str(error.detail),
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
        headers=error.headers,
    )


def _invalid(error: RequestValidationError) -> ApiError:
    """The first fault of a body: its place, the fault, and the given value."""
    fault = error.errors()[0]
    source, *location = fault["loc"]
    param = _path(error.body, location) if source == "body" else ".".join(map(str, location))
    return bad_request(f"{param or 'the body'}: {_message(fault, param)}", param=param)


def _message(fault: ErrorDetails, param: str | None) -> str:
    kind, message = fault["type"], fault["msg"].removeprefix("Value error, ")
    if kind == "union_tag_invalid":
        given = fault["ctx"]
        expected = given["expected_tags"].replace("'", "")
        name = given["discriminator"].strip("'")
        return f"the {name} is {str(given['tag'])[:60]!r}; expected one of {expected}"
    if kind == "union_tag_not_found":
        return f"expected an object with a {fault['ctx']['discriminator'].strip(chr(39))}"
    if kind in ("missing", "value_error", REFUSED) or not param:
        return message
    return f"{message}, not {_SHOWN.repr(fault['input'])}"


def _path(body: Any, location: Sequence[Any]) -> str | None:
    """`messages[0].content`: a location without the parts that name only types of ours."""
    path = ""
    for i, part in enumerate(location):
        if isinstance(body, dict) and isinstance(part, str) and part in body:
            body, path = body[part], f"{path}.{part}"
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body, path = body[part], f"{path}[{part}]"
        elif i == len(location) - 1 and isinstance(body, dict) and isinstance(part, str):
            path = f"{path}.{part}"  # a field that is missing
    return path.removeprefix(".")[:200] or None


_TOLD: dict[type[BaseException], Callable[[Any], ApiError]] = {
    ApiError: lambda error: error,
    RequestValidationError: _invalid,
    HTTPException: _http,
    PromptTooLongError: too_long,
    ContextFullError: lambda error: bad_request(str(error), code="context_length_exceeded"),
    InputError: lambda error: bad_request(str(error)),
    QueueFullError: lambda error: ApiError(
        429,
        str(error),
        type="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(error.retry_after)},
    ),
    QueueTimeoutError: lambda error: unavailable(str(error), code="queue_timeout"),
    WorkerLostError: lambda error: unavailable(str(error), code="worker_lost"),
    ClosedError: lambda _: unavailable("the server is shutting down", code="shutting_down"),
}
"""The first kind that fits counts."""


def api_error(error: BaseException) -> ApiError:
    """The error that a client is told. Details of an unexpected one go to the log alone."""
    for kind, told in _TOLD.items():
        if isinstance(error, kind):
            return told(error)
    log_crash(error)
    return ApiError(
        500,
        "the server failed at this request; its log says more",
        type="server_error",
        code="internal_error",
    )
