"""Errors in the form of Anthropic's API: https://platform.claude.com/docs/en/api/errors."""

from typing import Any, Literal

from pydantic import BaseModel

from dflash_local.server.http.errors import ApiError, error_form, error_responses

PATH = "/v1/messages"

VERSION_HEADER = "anthropic-version"
"""Every client of Anthropic's sends it, and no other client does."""

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


RESPONSES = error_responses(AnthropicErrorBody)


@error_form(PATH, header=VERSION_HEADER)
def anthropic_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """A server that cannot answer now is overloaded, 529: Anthropic's clients try again then."""
    status = 529 if error.status == 503 else error.status
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":
        # These words tell clients that it is time to shorten the conversation.
        message = f"prompt is too long: {message}"
    return status, {"type": "error", "error": {"type": kind, "message": message}}
