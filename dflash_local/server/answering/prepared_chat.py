"""A conversation made ready for the model: its prompt, what binds the answer, how to read it.

The chats of all APIs end up here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local.chat.dialect import Dialect, Parser
from dflash_local.chat.reasoning import CLOSE
from dflash_local.model import Model
from dflash_local.server.answering.sampling_fields import SamplingFields, sampling_options
from dflash_local.server.answering.tools import ToolUse
from dflash_local.server.http.errors import ApiError


@dataclass(frozen=True)
class PreparedChat:
    """`prompt`: token ids. `bindings`: the keyword arguments of `Model.astream` that tools or a
    schema need. `thinking_open`: the prompt ends inside of a reasoning part."""

    prompt: list[int]
    bindings: dict[str, Any]
    dialect: Dialect
    tools: ToolUse
    thinking_open: bool

    def parser(self) -> Parser:
        """A parser for one answer."""
        return self.dialect.parser(self.tools.allowed, thinking_open=self.thinking_open)

    def options(
        self, fields: SamplingFields, *, max_tokens: int | None, logprobs: int | None = None
    ) -> dict[str, Any]:
        """All keyword arguments of `Model.astream`. `logprobs`: how many alternatives to each
        token; None for no log-probabilities. Raises ApiError for a bad token id in `fields`."""
        options = {**sampling_options(fields), **self.bindings, "max_tokens": max_tokens}
        if self.dialect.stop:
            options["stop"] = (*fields.stop_texts, *self.dialect.stop)
        if logprobs is not None:
            options["logprobs"] = logprobs
        return options


def prepare_chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: ToolUse | None = None,
    schema: Mapping[str, Any] | bool | None = None,
    reasoning_effort: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    begun: str = "",
) -> PreparedChat:
    """Render, tokenise, and choose the grammar. It may take long: call it on another thread.

    `schema` binds the answer's content: a JSON schema, or True for any object. `reasoning_effort`
    is for templates that know it; "none" also tells templates like Qwen3's not to think. `begun` is
    the beginning of the answer, which the model goes on from. Raises ApiError for what this model
    cannot do, InputError for what its template refuses.
    """
    tools = tools or ToolUse()
    variables = {**_effort(reasoning_effort), **(template_kwargs or {})}
    prompt = model.chat_prompt(
        messages, tools=list(tools.shown) or None, chat_template_kwargs=variables
    )
    thinking_open = model.thinking_open(prompt)
    dialect = model.dialect
    bindings: dict[str, Any] = {"special": True} if dialect.special else {}
    if tools.force is not None:
        bindings["lark"] = _forced_call(model, tools, thinking_open)
    elif schema is not None and tools.allowed:
        raise ApiError(
            400,
            "a JSON schema binds the answer, tools need it free; give one of the two, "
            'or tool_choice "none"',
            param="response_format",
        )
    elif schema is not None:
        bindings |= _bound_answer(model, schema, prompt, thinking_open)
    if begun:
        if bindings or thinking_open:
            raise ApiError(
                400,
                "an answer can be begun for the model only where it is free text without reasoning "
                "before it; end the conversation with a message of the user",
                param="messages",
            )
        vocabulary = model.target.vocabulary
        prompt += vocabulary.tokenize(begun, special=False, add_special=False, n_ctx=model.n_ctx)
    return PreparedChat(prompt, bindings, dialect, tools, thinking_open)


def _effort(given: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    return {"reasoning_effort": given} | ({"enable_thinking": False} if given == "none" else {})


def _forced_call(model: Model, tools: ToolUse, thinking_open: bool) -> str:
    grammar = model.dialect.call_grammar(
        tools.allowed,
        choice=tools.force or "required",
        parallel=tools.parallel,
        is_token=model.is_token,
        thinking_open=thinking_open,
    )
    if grammar is None:
        raise ApiError(
            400,
            "this model's chat template has no tool calls, so none can be asked for; "
            "leave tool_choice out, or take another model",
            param="tool_choice",
        )
    return grammar


def _bound_answer(
    model: Model, schema: Mapping[str, Any] | bool, prompt: list[int], thinking_open: bool
) -> dict[str, Any]:
    """The schema binds what comes after the reasoning, where the model may reason."""
    if _has_thought(model, prompt):
        return {"json_schema": schema}
    grammar = model.dialect.answer_grammar(
        schema if isinstance(schema, Mapping) else {"type": "object"},
        is_token=model.is_token,
        thinking_open=thinking_open,
    )
    return {"json_schema": schema} if grammar is None else {"lark": grammar}


def _has_thought(model: Model, prompt: list[int]) -> bool:
    """Whether the prompt ends after a reasoning part: templates write an empty one where the model
    is not to think."""
    end = "".join(map(model.target.vocabulary.name, prompt[-16:]))
    return end.rstrip().endswith(CLOSE)
