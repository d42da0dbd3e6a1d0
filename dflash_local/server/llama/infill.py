"""`/infill`: what editors ask at every key: the text between what stands before and after."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response

from dflash_local.server.answering.api_answer import answer
from dflash_local.server.answering.generation import Task, choices, off_loop
from dflash_local.server.answering.infill_prompt import Gap, OtherText, infill_prompt
from dflash_local.server.llama.answers import EVENTS, LlamaAnswers, llama_options
from dflash_local.server.llama.schema import InfillRequest
from dflash_local.server.models.served import Served

router = APIRouter()
log = logging.getLogger("dflash_local.server")

_ANSWER = 256
"""Tokens kept free for an answer at least: however long the next one may be, its prompt is cut like
the last one's, and found in the cache."""


@router.post("/infill")
async def infill(request: Request, body: InfillRequest) -> Response:
    """Fill a gap. A model that has no tokens for it goes on with what stands before the gap."""
    told: set[str] = request.app.state.told_of_infill

    async def begin(served: Served) -> LlamaAnswers:
        model, vocabulary = served.model, served.model.target.vocabulary
        if vocabulary.infill is None and served.name not in told:
            told.add(served.name)
            log.warning(
                "%s has no tokens to fill a gap with; /infill goes on with the text before it",
                served.name,
            )
        others = tuple(OtherText(other.text, other.filename) for other in body.input_extra)
        gap = Gap(body.input_prefix, body.input_suffix, body.prompt, others)
        room = model.n_ctx - min(max(body.n_predict, _ANSWER), model.n_ctx // 2)
        prompt = await off_loop(infill_prompt, vocabulary, gap, room=room)
        return LlamaAnswers(served, body, _tasks(body, prompt))

    return await answer(request, body.model, begin, EVENTS if body.stream else None)


def _tasks(body: InfillRequest, prompt: list[int]) -> list[Task]:
    """Of several answers the first is the likeliest, unless the request has a temperature."""
    tasks = choices(prompt, llama_options(body), body.n_cmpl)
    if body.temperature is None:
        tasks[0] = Task(prompt, {**tasks[0].options, "temperature": 0.0})
    return tasks
