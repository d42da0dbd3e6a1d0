"""A model for simonw/llm, once both are installed in one environment: `llm -m dflash "..."`.

The pair and its settings are those of `dflash-local chat`: of the settings file and the
environment, else smollm2-135m. `llm -m dflash -o target FILE -o draft FILE` names another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field

from .chat import chat
from .loading import load_model
from .options import generation_arguments
from .settings import default_map
from .terminal import Speaker

if TYPE_CHECKING:
    from dflash_local import Model

_FILES = ("target", "draft")


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Any) -> None:
    register(DflashModel(), aliases=("dflash",))


class DflashModel(llm.Model):  # type: ignore[misc]
    """Answers with drafts. The model stays loaded as long as the process."""

    model_id = "dflash-local"
    can_stream = True
    supports_schema = True

    class Options(llm.Options):  # type: ignore[misc]
        target: str | None = Field(None, description="GGUF file of the model that answers")
        draft: str | None = Field(None, description="GGUF file of its DFlash drafter")
        max_tokens: int | None = Field(None, description="End after this many tokens")
        temperature: float | None = Field(None, description="0 takes the most likely token")
        top_k: int | None = Field(None, description="Draw from so many of the likeliest tokens")
        top_p: float | None = Field(None, description="Draw from tokens that have this probability")
        seed: int | None = Field(None, description="The same seed gives the same answer")
        draft_width: int | None = Field(None, description="Tokens checked per round; 0: no drafts")

    def __init__(self) -> None:
        self._files: tuple[str | None, str | None] | None = None
        self._model: Model | None = None
        self._arguments: dict[str, Any] = {}

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        given = prompt.options.model_dump(exclude_none=True)
        model = self._loaded(*(given.pop(name, None) for name in _FILES))
        options = {**self._arguments, **given}
        if prompt.schema:
            options["json_schema"] = prompt.schema
        options.setdefault("max_tokens", None)
        result = None
        for chunk in model.stream_chat(_messages(prompt, conversation), **options):
            if chunk.content:
                yield chunk.content
            result = chunk.result
        if result is not None:
            response.set_usage(input=result.stats.prompt_tokens, output=len(result.tokens))
            response.response_json = {"stats": result.stats.as_dict()}

    def _loaded(self, target: str | None, draft: str | None) -> Model:
        if self._model is None or self._files != (target, draft):
            if self._model is not None:
                self._model.close()
            from .main import group

            settings = default_map(group).get("chat", {})
            values = chat.make_context("chat", [], default_map=settings).params
            if target is not None:
                values |= {"target": target, "draft": draft}
            self._arguments = generation_arguments(values)
            self._model = load_model(values, Speaker(True))
            self._files = target, draft
        return self._model


def _messages(prompt: Any, conversation: Any) -> list[dict[str, str]]:
    messages = []
    earlier = conversation.responses if conversation else []
    system = prompt.system or next((r.prompt.system for r in earlier if r.prompt.system), None)
    if system:
        messages.append({"role": "system", "content": system})
    for response in earlier:
        messages.append({"role": "user", "content": response.prompt.prompt})
        messages.append({"role": "assistant", "content": response.text()})
    return [*messages, {"role": "user", "content": prompt.prompt}]
