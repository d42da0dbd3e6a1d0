"""`/api/pull` and `/api/delete`: https://github.com/ollama/ollama/blob/main/docs/api.md."""

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from dflash_local.server.answering.api_answer import answered, library_of
from dflash_local.server.http.event_stream import LINES, AnswerStream
from dflash_local.server.ollama.errors import RESPONSES
from dflash_local.server.ollama.model_list import untagged
from dflash_local.server.ollama.schema import PullRequest, ShowRequest

router = APIRouter(responses=RESPONSES)


@router.post("/api/pull")
async def pull(request: Request, body: PullRequest) -> Response:
    """Fetch a model by its name, as `dflash-local pull` does, and serve it. Leaving ends the
    transfer; the next request goes on with it."""
    events = library_of(request).fetch(_name(request, body))
    if body.stream is not False:
        return AnswerStream(events, LINES)

    async def whole() -> Response:
        async with aclosing(events):
            async for event in events:
                last = event
        return JSONResponse(last)

    return await answered(request, whole())


@router.delete("/api/delete")
async def delete(request: Request, body: ShowRequest) -> dict[str, Any]:
    """Remove a model from this disk, unless it is in use or the server was started with it."""
    return {"freed": await library_of(request).remove(_name(request, body))}


def _name(request: Request, body: ShowRequest) -> str:
    return untagged(request, body.model or body.name) or ""
