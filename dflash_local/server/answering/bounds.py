"""Types of request fields, each with its bounds, shared by all schemas.

Numbers are strict: a text or a boolean is no number, as with OpenAI. No field is unbounded: what
no model could use is refused before any work. What a schema has no field for is ignored, which is
pydantic's default: clients send what they know from other servers.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

MAX_INT = 2**31 - 1
"""llama.cpp takes its counts as 32-bit integers."""

MAX_TEXT = 8 << 20
"""Characters of one text; the context ends long before."""

MAX_CHOICES = 16
MAX_MESSAGES = 10_000
MAX_STOPS = 64
MAX_TOOLS = 512

MaxTokens = Annotated[int, Field(strict=True, ge=1, le=MAX_INT)]
Predict = Annotated[int, Field(strict=True, ge=-1, le=MAX_INT)]
"""llama-server's `n_predict`: -1 to the end of text, 0 reads the prompt into the cache."""

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INT)]
LastN = Annotated[int, Field(strict=True, ge=-1, le=MAX_INT)]
"""How many tokens to look back at; -1 is the whole context."""

Milliseconds = Annotated[int, Field(strict=True, ge=0, le=24 * 3600 * 1000)]
Choices = Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), le=2**64 - 1)]
Logprobs = Annotated[int, Field(strict=True, ge=0, le=5)]
TopLogprobs = Annotated[int, Field(strict=True, ge=0, le=20)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=MAX_INT)]

Temperature = Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)]
Probability = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
Factor = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
"""A factor or exponent of llama-server's samplers."""

Bias = Annotated[float, Field(strict=True, ge=-100, le=100, allow_inf_nan=False)]

Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, max_length=MAX_TEXT)]
JsonText = Annotated[str, Field(strict=True, max_length=1 << 20)]
"""Is parsed, which holds up all other requests for as long as it takes."""

Name = Annotated[str, Field(strict=True, min_length=1, max_length=256)]
Label = Annotated[str, Field(strict=True, max_length=1024)]
"""A text that is passed on or ignored, such as `user`."""

StopText = Annotated[str, Field(strict=True, min_length=1, max_length=1024)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
TokenIds = Annotated[list[TokenId], Field(max_length=4 << 20)]
Prompt = Text | TokenIds | Annotated[list[Text | TokenIds], Field(max_length=MAX_CHOICES)]
"""A text, token ids, or several of either."""

LogitBias = Annotated[dict[Annotated[str, Field(max_length=16)], Bias], Field(max_length=1024)]
"""OpenAI's: token ids, as texts, to what is added to their logits."""

JsonObject = dict[str, Any]
"""Bounded by the body's size and depth, which are checked before it is read."""
