"""`/infill`: what editors ask at every key: the text between what stands before and after."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response

from dflash_local.model import Model
from dflash_local.server.completion_schema import InfillRequest
from dflash_local.server.fim import Gap, OtherText, infill_prompt
from dflash_local.server.generation import Task, choices, off_loop
from dflash_local.server.llama_answer import llama_options, respond

router = APIRouter()
log = logging.getLogger("dflash_local.server")

_ANSWER = 256
"""Tokens kept free for an answer at least: however long the next one may be, its prompt is cut like
the last one's, and found in the cache."""


@router.post("/infill")
async def infill(request: Request, body: InfillRequest) -> Response:
    """Fill a gap. A model that has no tokens for it goes on with what stands before the gap."""
    model: Model = request.app.state.model
    vocabulary = model.target.vocabulary
    if vocabulary.infill is None and not getattr(request.app.state, "told_of_infill", False):
        request.app.state.told_of_infill = True
        log.warning(
            "this model has no tokens to fill a gap with; /infill goes on with the text before it"
        )
    others = tuple(OtherText(other.text, other.filename) for other in body.input_extra)
    gap = Gap(body.input_prefix, body.input_suffix, body.prompt, others)
    room = model.n_ctx - min(max(body.n_predict, _ANSWER), model.n_ctx // 2)
    prompt = await off_loop(infill_prompt, vocabulary, gap, room=room)
    return await respond(request, body, _tasks(body, prompt))


def _tasks(body: InfillRequest, prompt: list[int]) -> list[Task]:
    """Of several answers the first is the likeliest, unless the request has a temperature."""
    tasks = choices(prompt, llama_options(body), body.n_cmpl)
    if body.temperature is None:
        tasks[0] = Task(prompt, {**tasks[0].options, "temperature": 0.0})
    return tasks
