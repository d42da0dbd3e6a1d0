"""Errors as Anthropic's API words them: https://platform.claude.com/docs/en/api/errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from dflash_local.server.http.errors import ApiError, error_form

PATH = "/v1/messages"

VERSION_HEADER = "anthropic-version"
"""Every client of Anthropic's sends it, and no other does."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every answer that is an error, and the last event of a stream that breaks."""

    type: Literal["error"]
    error: AnthropicErrorDetail


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicErrorBody, "description": "The request is refused, and why."},
    "5XX": {
        "model": AnthropicErrorBody,
        "description": "The server cannot answer it now, or failed.",
    },
}
"""What /openapi.json says of errors."""


@error_form(PATH, header=VERSION_HEADER)
def anthropic_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """A server that cannot answer now is overloaded: 529, which its clients try again."""
    status = 529 if error.status == 503 else error.status
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        # By these words clients know that it is time to shorten the conversation.
        message = f"prompt is too long: {message}"
    return status, {"type": "error", "error": {"type": kind, "message": message}}
