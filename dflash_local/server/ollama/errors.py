"""Errors as Ollama's API words them: a line, and nothing else."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from dflash_local.server.http.errors import ApiError, error_form

PATH = "/api"


class OllamaErrorBody(BaseModel):
    """The body of every answer that is an error, and the last line of a stream that breaks."""

    error: str


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaErrorBody, "description": "The request is refused, and why."},
    "5XX": {"model": OllamaErrorBody, "description": "The server cannot answer it now, or failed."},
}
"""What /openapi.json says of errors."""


@error_form(PATH)
def ollama_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, {"error": error.message}
