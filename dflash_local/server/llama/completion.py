"""`/completion` and `/infill`: llama-server's own completions, and the requests of editors at every
key press."""

from fastapi import APIRouter, Request, Response

from dflash_local.chat.pictures import Pictures
from dflash_local.model import Model
from dflash_local.pairs.defaults import CHAT_SAMPLING
from dflash_local.server.answering.api_answer import respond
from dflash_local.server.answering.generation import GenerationTask, tasks_for
from dflash_local.server.answering.infill_prompt import Gap, infill_prompt, infill_room
from dflash_local.server.answering.request_check import RequestCheck
from dflash_local.server.llama.answers import EVENTS, LlamaAnswers, llama_options
from dflash_local.server.llama.schema import CompletionRequest, InfillRequest, MediaPrompt
from dflash_local.server.llama.tokenize import mixed_text, mixed_tokens
from dflash_local.server.models.served_model import LoadedModel

router = APIRouter()


@router.post("/completion")
@router.post("/completions", include_in_schema=False)
async def completion(request: Request, body: CompletionRequest) -> Response:
    """Go on from each prompt. `tokens_cached` of its tokens needed no computing."""
    form = EVENTS if body.stream else None
    return await respond(request, body.model, body, _token_ids, _answers, form)


@router.post("/infill")
async def infill(request: Request, body: InfillRequest) -> Response:
    """Fill a gap. A model that has no tokens for it goes on from the text before the gap."""
    check: RequestCheck = request.app.state.request_check

    def answers(loaded: LoadedModel, body: InfillRequest, prompt: list[int]) -> LlamaAnswers:
        if loaded.model.target.vocabulary.infill is None:
            line = "has no tokens to fill a gap with; /infill goes on from the text before it"
            check.tell_once(f"{loaded.name} {line}")
        return LlamaAnswers(loaded, body, _infill_tasks(body, prompt))

    form = EVENTS if body.stream else None
    return await respond(request, body.model, body, _infill_prompt, answers, form)


def _token_ids(model: Model, body: CompletionRequest) -> list[list[int]]:
    vocabulary = model.target.vocabulary

    def tokens_of(prompt: list[str | int] | MediaPrompt) -> list[int]:
        if not isinstance(prompt, MediaPrompt):
            return mixed_tokens(vocabulary, prompt, n_ctx=model.n_ctx)
        pictures = Pictures(model.projector)
        text = pictures.marked(prompt.prompt_string, prompt.multimodal_data)
        starts = iter((True,))  # the first part begins as the model wants it
        return pictures.put_into(
            text,
            lambda part: vocabulary.tokenize(
                part, add_special=next(starts, False), n_ctx=model.n_ctx
            ),
        )

    return [tokens_of(prompt) for prompt in body.prompts]


def _answers(
    loaded: LoadedModel, body: CompletionRequest, prompts: list[list[int]]
) -> LlamaAnswers:
    options = llama_options(body)
    tasks = [task for prompt in prompts for task in tasks_for(prompt, options, body.n_cmpl)]
    return LlamaAnswers(loaded, body, tasks)


def _infill_prompt(model: Model, body: InfillRequest) -> list[int]:
    vocabulary = model.target.vocabulary
    texts = (body.input_prefix, body.input_suffix, body.prompt)
    prefix, suffix, begun = (mixed_text(vocabulary, text) for text in texts)
    gap = Gap(prefix, suffix, begun, body.input_extra)
    return infill_prompt(vocabulary, gap, room=infill_room(model.n_ctx, body.n_predict))


def _infill_tasks(body: InfillRequest, prompt: list[int]) -> list[GenerationTask]:
    """The first of several answers is the likeliest, unless the request has a temperature."""
    tasks = tasks_for(prompt, llama_options(body), body.n_cmpl)
    if body.temperature is None:
        drawn = CHAT_SAMPLING["temperature"]
        for i, task in enumerate(tasks):
            options = {**task.options, "temperature": drawn if i else 0.0}
            tasks[i] = GenerationTask(prompt, options)
    return tasks
