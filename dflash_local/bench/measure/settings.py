"""Settings: the variants of decoding that are compared, and the limits of each answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_local.draft.shape import DraftShape

Width = int | Literal["auto"]
"""Target rows per verify pass. "auto" leaves it to the model, 0 is plain decoding."""

CacheState = Literal["cold", "hit"]

CACHE_STATES: tuple[CacheState, ...] = ("cold", "hit")
"""With empty caches, and right after the same prompt."""

Say = Callable[[str], None]
"""Called with each line about the progress."""


@dataclass(frozen=True)
class Variant:
    """One way to decode: rows of a verify pass, the shape of the drafts in them, and whether copies
    of the text are drafted, too."""

    width: Width = "auto"
    shape: DraftShape = "chain"
    copies: bool = True

    def __str__(self) -> str:
        if self == PLAIN:
            return "plain"
        name = "auto" if self.shape == "auto" else f"{self.shape} {self.width}"
        return name if self.copies else f"{name}, no copies"

    def options(self) -> dict[str, Any]:
        """A request's settings: keyword arguments of `Model.stream` and of `Request`. Copies are
        the engine's to offer."""
        return {"draft_width": self.width, "draft_shape": self.shape}


PLAIN = Variant(0)


def variants_from(shapes: Sequence[DraftShape], widths: Sequence[int]) -> tuple[Variant, ...]:
    """Each shape with the width that the model chooses, then with each fixed one. The shape "auto"
    has no fixed widths, as the model chooses shape and width together."""
    fixed = [Variant(width, shape) for width in widths for shape in shapes if shape != "auto"]
    return tuple(dict.fromkeys([Variant("auto", shape) for shape in shapes] + fixed))


@dataclass(frozen=True)
class RunSettings:
    """`variants` are those beside plain decoding; none without a drafter. `caches`: "hit" comes
    after "cold". `compare`: whether greedy answers with drafts are compared with plain ones, token
    by token."""

    temperatures: tuple[float, ...] = (0.0, 0.8)
    variants: tuple[Variant, ...] = (Variant(),)
    caches: tuple[CacheState, ...] = ("cold",)
    max_tokens: int = 96
    repeat: int = 1
    seed: int = 0
    compare: bool = True

    def turns(self, i: int = 0) -> Sequence[Variant]:
        """Plain decoding and the variants. Every other turn goes backwards, so that a drift of the
        machine hits all of them alike."""
        turns = (PLAIN, *self.variants)
        return turns if i % 2 == 0 else turns[::-1]
