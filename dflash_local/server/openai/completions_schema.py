"""What `/v1/completions` is sent: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from dflash_local.server.answering import bounds
from dflash_local.server.answering.sampling_fields import SamplingFields, token_limit
from dflash_local.server.http.errors import ApiError
from dflash_local.server.openai.chat_schema import StreamOptions
from dflash_local.server.openai.response_format import ResponseFormat

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route alone."""


MAX_ANSWERS = 32
"""To one request; each waits for a slot."""


def _kind(value: Any) -> str:
    if not isinstance(value, list):
        return "text"
    return "ids" if value and isinstance(value[0], int) else "several"


def _one_kind(value: Any) -> str:
    return "ids" if isinstance(value, list) else "text"


_One = Annotated[
    Annotated[bounds.Text, Tag("text")] | Annotated[bounds.TokenIds, Tag("ids")],
    Discriminator(_one_kind),
]
_Several = Annotated[list[_One], Field(min_length=1, max_length=bounds.MAX_CHOICES)]
Prompt = Annotated[
    Annotated[bounds.Text, Tag("text")]
    | Annotated[bounds.TokenIds, Tag("ids")]
    | Annotated[_Several, Tag("several")],
    Discriminator(_kind),
]
"""A text, token ids, or several of either."""


class CompletionsRequest(SamplingFields):
    """Prompts to go on with. `suffix` is what comes after the answer: models that were taught to
    fill a gap write what is between. Where one model is served any name is taken."""

    prompt: Prompt
    model: bounds.Label | None = None
    suffix: bounds.Text | None = None
    echo: bounds.Flag | None = None
    stream: bounds.Flag | None = None
    stream_options: StreamOptions | None = None
    n: bounds.Choices | None = None
    best_of: bounds.Choices | None = None
    max_tokens: bounds.Predict | None = None
    logprobs: bounds.Logprobs | None = None
    response_format: ResponseFormat | None = None
    json_schema: bounds.JsonObject | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if isinstance(given, str):
            return [given]
        whole = [piece for piece in given if isinstance(piece, int)]
        return [whole] if whole else [piece for piece in given if not isinstance(piece, int)]

    @property
    def limit(self) -> int | None:
        given = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return token_limit("max_tokens", given)

    def check(self) -> None:
        """Raises ApiError where fields contradict each other."""
        n = self.n or 1
        if len(self.prompts) * n > MAX_ANSWERS:
            raise ApiError(
                400,
                f"{len(self.prompts)} prompts with n {n} ask for {len(self.prompts) * n} answers; "
                f"at most {MAX_ANSWERS} are given to one request",
                param="n",
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options are for streams; set stream", param="stream_options"
            )
        if self.best_of is not None and self.best_of != n:
            raise ApiError(
                400,
                f"best_of is {self.best_of} with n {n}; answers are not ranked here, leave it out",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400,
                "echo with logprobs is not supported: a prompt's own are not computed; "
                "leave out one of the two",
                param="logprobs",
            )
        if self.echo and self.suffix:
            raise ApiError(
                400, "echo with suffix is not supported; leave out one of the two", param="echo"
            )
