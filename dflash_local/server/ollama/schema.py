"""Requests to Ollama's API: https://github.com/ollama/ollama/blob/main/docs/api.md.

How a model is loaded is up to whoever starts the server: options such as `num_ctx` are ignored, and
so is `keep_alive` where the server keeps its only model loaded.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from dflash_local.chat.pictures import MOST_IMAGES
from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields, token_limit
from dflash_local.server.answering.tools import FunctionTool
from dflash_local.server.models.keep_alive import keep_alive_s

_REFUSED = {"template": "the model's own chat template is used; leave template out, or give raw"}

_Predict = Annotated[int, Field(strict=True, ge=-2, le=bounds.MAX_INT), bounds.WHOLE]


class OllamaOptions(SamplingFields):
    """`num_predict` -1 and -2 are without limit but the context's."""

    num_predict: _Predict | None = None

    @property
    def limit(self) -> int | None:
        given = self.num_predict
        return None if given == -2 else token_limit("options.num_predict", given)


Think = Annotated[
    Annotated[bounds.Flag, Tag("flag")]
    | Annotated[Literal["low", "medium", "high"], Tag("effort")],
    Discriminator(lambda value: "effort" if isinstance(value, str) else "flag"),
]


def _seconds(given: Any) -> float | None:
    return None if given in (None, "") else keep_alive_s(given)


KeepAlive = Annotated[Any, BeforeValidator(_seconds)]
"""Seconds that the model stays loaded after this request, or a text such as 5m; None: the
server's own."""


class OllamaRequest(BaseModel):
    """Fields of both chats and completions. Answers are streams unless `stream` is false."""

    model: bounds.Label | None = None
    stream: bounds.Flag | None = None
    format: Literal["", "json"] | bounds.JsonObject | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    options: OllamaOptions | None = None
    logprobs: bounds.Flag | None = None
    top_logprobs: bounds.TopLogprobs | None = None

    _refuse = bounds.refuse(_REFUSED, unless=(None, False, 0, "", []))

    @property
    def n_alternatives(self) -> int | None:
        """The number to report with each token; None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def sampling(self) -> OllamaOptions:
        return self.options or OllamaOptions()

    @property
    def schema_of_answer(self) -> Any:
        """True for any JSON object, None for free text."""
        return True if self.format == "json" else self.format or None

    @property
    def effort(self) -> str | None:
        return self.think if isinstance(self.think, str) else None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Without `think`, models think as their templates have it."""
        return {} if self.think is None else {"enable_thinking": self.think is not False}


class OllamaCalledFunction(BaseModel):
    """`arguments` is an object, not a text as with OpenAI."""

    name: bounds.Name
    arguments: bounds.JsonObject = Field(default_factory=dict)


class OllamaToolCall(BaseModel):
    """A call that an earlier answer made."""

    id: bounds.Label | None = None
    function: OllamaCalledFunction


Images = Annotated[bounds.ListOf[bounds.Picture], Field(max_length=MOST_IMAGES)]
"""Pictures in base64."""


def _with_images(text: str, images: list[str] | None) -> Any:
    """A message's content with pictures in front, as Ollama has it."""
    if not images:
        return text
    urls = [image if image.startswith("data:") else f"data:;base64,{image}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}]


class OllamaMessage(BaseModel):
    """`thinking`: the reasoning of an earlier answer. `tool_name`: whose result this is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: bounds.Text | None = None
    thinking: bounds.Text | None = None
    tool_calls: bounds.ToolsOf[OllamaToolCall] | None = None
    tool_name: bounds.Label | None = None
    tool_call_id: bounds.Label | None = None
    images: Images | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        message: dict[str, Any] = {
            "role": self.role,
            "content": _with_images(self.content or "", self.images),
        }
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", **call.model_dump(exclude_none=True)}
                for call in self.tool_calls
            ]
        if self.tool_name:
            message["name"] = self.tool_name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer. Without messages the model is only loaded, or unloaded. A last
    message of the assistant begins the answer, as with Ollama."""

    messages: bounds.MessagesOf[OllamaMessage] = Field(default_factory=list)
    tools: bounds.ToolsOf[FunctionTool] | None = None

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        return [message.for_template() for message in self.messages]


class GenerateRequest(OllamaRequest):
    """A message to answer, or with `raw` a text to go on from, or with `suffix` a gap to fill.
    Without any of them the model is only loaded, or unloaded. `context` are the token ids of an
    earlier answer with all before it, after which the message comes."""

    prompt: bounds.Text | None = None
    suffix: bounds.Text | None = None
    system: bounds.Text | None = None
    raw: bounds.Flag | None = None
    context: bounds.TokenIds | None = None
    images: Images | None = None

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_images(self.prompt or "", self.images)
        return [*system, {"role": "user", "content": content}]


class ShowRequest(BaseModel):
    """A model by its name. `name` is the old name of `model`."""

    model: bounds.Label | None = None
    name: bounds.Label | None = None


class PullRequest(ShowRequest):
    """A model to fetch. The answer is a stream unless `stream` is false."""

    stream: bounds.Flag | None = None
