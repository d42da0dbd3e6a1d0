"""Images in a text of token ids: a negative id for each position that an image takes.

The ids are made of the image's content, so texts with the same images are equal, and others are
not. An image is decoded as a whole, and texts are never cut inside of one. With M-RoPE it takes
fewer positions than cells: its first id says how many cells more. Ids fit 32 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MOST_MORE = (1 << 15) - 1
"""The most cells that an image can have beyond its positions."""


@dataclass(frozen=True)
class Embeddings:
    """An image as the target's first layer takes it: `rows` is float32 [n, n_embd_inp], and
    `positions` int32 [1, n], with M-RoPE [4, n]."""

    rows: NDArray[np.float32]
    positions: NDArray[np.int32]
    is_causal: bool


@dataclass(frozen=True)
class Image:
    """An image, or a part of one that is decoded at once. `embeddings` begins to compute it for a
    first position, on another thread."""

    n_rows: int
    n_positions: int
    embeddings: Callable[[int], Future[Embeddings]]

    @property
    def n_more(self) -> int:
        """Cells beyond its positions."""
        return self.n_rows - self.n_positions


@dataclass
class ImageText:
    """Token ids with images: `images` by the place of their first id."""

    tokens: list[int] = field(default_factory=list)
    images: dict[int, Image] = field(default_factory=dict)

    def add_image(self, image: Image, key: bytes) -> None:
        """Append an image whose content has the hash `key`."""
        self.images[len(self.tokens)] = image
        self.tokens += ids_of(key, image.n_positions, image.n_more)

    def extend(self, other: ImageText) -> None:
        """Append another text."""
        begin = len(self.tokens)
        self.images |= {begin + place: image for place, image in other.images.items()}
        self.tokens += other.tokens


class Prompt(list[int]):
    """Token ids of a prompt, with what its negative ids stand for."""

    def __init__(self, text: ImageText) -> None:
        super().__init__(text.tokens)
        self.images = text.images

    def behind(self, tokens: Sequence[int]) -> Prompt:
        """A prompt that begins with these tokens and goes on with this one."""
        whole = ImageText(list(tokens))
        whole.extend(ImageText(self, self.images))
        return Prompt(whole)


def ids_of(key: bytes, n_positions: int, n_more: int) -> list[int]:
    """The ids of an image whose content has the hash `key`."""
    assert 0 <= n_more <= MOST_MORE
    digest = hashlib.shake_128(key).digest(4 * n_positions)
    first, *others = (int(word) for word in np.frombuffer(digest, "<u4"))
    return [-2 * ((n_more << 15) + (first >> 17)) - 2, *(-2 * (word >> 2) - 1 for word in others)]


def is_inner(token: int) -> bool:
    """Whether the id belongs to the same image as the one before it."""
    return token < 0 and token % 2 == 1


def more_cells(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The images of a text that take more cells than positions: where each ends, and how many more
    cells it takes."""
    found: list[tuple[int, int]] = []
    if min(tokens, default=0) >= 0:
        return found
    for begin, token in enumerate(tokens):
        if token < 0 and not is_inner(token) and (n_more := (-token - 2) >> 16):
            end = begin + 1
            while end < len(tokens) and is_inner(tokens[end]):
                end += 1
            found.append((end, n_more))
    return found


def n_cells(tokens: Sequence[int]) -> int:
    """Cells that a text takes in the target's cache."""
    return len(tokens) + sum(n_more for _, n_more in more_cells(tokens))


def whole(tokens: Sequence[int], length: int) -> int:
    """`length`, or less, so that no image of the text is cut there."""
    while 0 < length < len(tokens) and is_inner(tokens[length]):
        length -= 1
    return length


def without_images(tokens: Iterable[int]) -> list[int]:
    """The ids that are tokens."""
    return [token for token in tokens if token >= 0]


def spoken(tokens: Iterable[int]) -> list[int]:
    """The ids with a token in place of each that stands for a part of an image."""
    return [max(token, 0) for token in tokens]
