"""`/apply-template`: llama-server's, by which clients see what a conversation becomes."""

from __future__ import annotations

from fastapi import APIRouter, Request

from dflash_local.model import Model
from dflash_local.server.answering.api_answer import pool_of
from dflash_local.server.answering.generation import off_loop
from dflash_local.server.answering.prepared_chat import prepare
from dflash_local.server.answering.tools import tool_use
from dflash_local.server.openai.chat_schema import ChatRequest

router = APIRouter()


@router.post("/apply-template")
async def apply_template(request: Request, body: ChatRequest) -> dict[str, str]:
    """The prompt of a chat as text, control tokens by their names. Nothing is generated."""
    async with pool_of(request).use(body.model) as served:
        return {"prompt": await off_loop(_prompt, served.model, body)}


def _prompt(model: Model, body: ChatRequest) -> str:
    conversation = prepare(
        model,
        [message.shown() for message in body.messages],
        tools=tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls),
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs,
    )
    return model.target.vocabulary.detokenize(conversation.prompt, special=True)
