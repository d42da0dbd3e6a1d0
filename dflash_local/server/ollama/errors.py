"""Errors in the form of Ollama's API: one line, and nothing else."""

from typing import Any

from pydantic import BaseModel

from dflash_local.server.http.errors import ApiError, error_form, error_responses

PATH = "/api"


class OllamaErrorBody(BaseModel):
    """The body of every answer that is an error, and the last line of a stream that breaks."""

    error: str


RESPONSES = error_responses(OllamaErrorBody)


@error_form(PATH)
def ollama_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, {"error": error.message}
