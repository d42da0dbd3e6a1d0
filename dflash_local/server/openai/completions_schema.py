"""Requests to `/v1/completions`: https://platform.openai.com/docs/api-reference/completions."""

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from dflash_local.server.answering import bounds
from dflash_local.server.http.errors import bad_request
from dflash_local.server.openai.choices_schema import ChoicesRequest

MAX_ANSWERS = 32
"""To one request; each needs a slot."""


def _kind(value: Any) -> str:
    if not isinstance(value, list):
        return "text"
    return "ids" if value and isinstance(value[0], int) else "several"


PromptField = Annotated[
    Annotated[bounds.Text, Tag("text")]
    | Annotated[bounds.TokenIds, Tag("ids")]
    | Annotated[
        bounds.ListOf[bounds.TextOr[bounds.TokenIds]],
        Field(min_length=1, max_length=bounds.MAX_CHOICES),
        Tag("several"),
    ],
    Discriminator(_kind),
]
"""A text, token ids, or several of either."""


class CompletionsRequest(ChoicesRequest):
    """Prompts to go on from. `suffix` comes after the answer: models that were taught to fill a gap
    write the text between. A server of one model takes any model name."""

    USUAL_LIMIT: ClassVar[int | None] = 16  # OpenAI's, for this route only

    prompt: PromptField
    suffix: bounds.Text | None = None
    echo: bounds.Flag | None = None
    best_of: bounds.Choices | None = None
    logprobs: bounds.Logprobs | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if isinstance(given, str):
            return [given]
        ids = [piece for piece in given if isinstance(piece, int)]
        return [ids] if ids else [piece for piece in given if not isinstance(piece, int)]

    @property
    def n_alternatives(self) -> int | None:
        """The number to report with each token; None for no log-probabilities."""
        return self.n_probs or None if self.logprobs is None else self.logprobs

    def check(self) -> None:
        super().check()
        n = self.n or 1
        if len(self.prompts) * n > MAX_ANSWERS:
            raise bad_request(
                f"{len(self.prompts)} prompts with n {n} ask for {len(self.prompts) * n} answers; "
                f"one request can have at most {MAX_ANSWERS}",
                param="n",
            )
        if self.best_of is not None and self.best_of != n:
            raise bad_request(
                f"best_of is {self.best_of} with n {n}; answers are not ranked here, leave it out",
                param="best_of",
            )
        if self.echo and self.n_alternatives is not None and self.stream:
            raise bad_request(
                "echo with logprobs is for answers in one piece; leave stream out", param="logprobs"
            )
        if self.echo and self.suffix:
            raise bad_request(
                "echo with suffix is not supported; leave out one of the two", param="echo"
            )
