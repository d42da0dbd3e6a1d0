"""Pictures in messages: taken out before the template sees them, and put into the prompt."""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_local.chat.quoting import tokenized
from dflash_local.errors import InputError
from dflash_local.target_model.images import ImageText, Prompt
from dflash_local.target_model.pixels import from_base64, image_file
from dflash_local.target_model.projector import Projector
from dflash_local.target_model.vocabulary import Vocabulary

MOST_IMAGES = 256
"""Of a request. A chat sends all of its pictures again with each turn; most are known then, and the
context and a request's bytes end it first."""

NO_PROJECTOR = (
    "image input is not supported: this model reads text only, as it was loaded without a "
    "projector; load a vision model with --mmproj FILE"
)
MARKER = "<__media__>"
"""What stands for a picture in prompts of llama-server's clients."""

_KINDS = ("image_url", "image", "input_image")


class Pictures:
    """The pictures of one conversation. Messages get marks in their place, which no text can have:
    they are drawn anew each time."""

    def __init__(
        self, projector: Projector | None, fetch: Callable[[str], bytes] | None = None
    ) -> None:
        """`fetch` gives the file at an address of the web, if such are fetched."""
        self._projector = projector
        self._fetch = fetch
        self._nonce = secrets.token_hex(16)
        self._marks = re.compile(f"<{self._nonce}:([0-9]+)>")
        self._found: list[ImageText] = []

    def taken_from(self, messages: Any) -> Any:
        """Messages with a mark in place of each picture. Raises InputError for pictures that
        cannot be read, and where there is no projector."""
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            return messages  # `conversation` says what is wrong
        return [self._message(message) for message in messages]

    def _message(self, message: Any) -> Any:
        parts: Any = message.get("content") if isinstance(message, Mapping) else None
        is_list = isinstance(parts, Sequence) and not isinstance(parts, str)
        if not is_list or not any(map(_is_image, parts)):
            return message
        # As llama-server has it: a line break between texts, and none beside a picture.
        content, gap = "", ""
        for part in parts:
            if _is_image(part):
                given = part.get("image_url") if "image_url" in part else part.get("image")
                given = given.get("url") if isinstance(given, Mapping) else given
                content, gap = content + self._mark(given), ""
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                content += (gap if content else "") + part["text"]
                gap = "\n"
            else:
                return {**message, "content": [p for p in parts if not _is_image(p)]}
        return {**message, "content": content}

    def _mark(self, given: object) -> str:
        if self._projector is None:
            raise InputError(NO_PROJECTOR)
        n = len(self._found)
        if n == MOST_IMAGES:
            raise InputError(
                f"more than {MOST_IMAGES} images in a request; leave out the first ones"
            )
        if self._fetch and isinstance(given, str) and re.match("https?://", given, re.IGNORECASE):
            given = self._fetch(given)
        self._found.append(self._projector.read(image_file(given)))
        return f"<{self._nonce}:{n}>"

    def marked(self, text: str, files: Sequence[str]) -> str:
        """A prompt as llama-server has it: with `MARKER` in place of each picture, whose files
        are in base64. Raises InputError, also where there are more of the one than of the other."""
        pieces = text.split(MARKER)
        if len(pieces) != len(files) + 1:
            raise InputError(
                f"{len(files)} images, and {len(pieces) - 1} times {MARKER} in the prompt"
            )
        marks = [self._mark(from_base64(file)) for file in files]
        return "".join(map("".join, zip(pieces, [*marks, ""], strict=True)))

    def tokenized(self, text: str, vocabulary: Vocabulary, n_ctx: int) -> list[int]:
        """Token ids of a rendered conversation: of pictures a `Prompt`. As `quoting.tokenized`."""
        return self.put_into(text, lambda part: tokenized(part, vocabulary, n_ctx))

    def put_into(self, text: str, tokens_of: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a text with the marks; those of its parts are `tokens_of` them."""
        if not self._found:
            return tokens_of(text)
        whole = ImageText()
        for i, part in enumerate(self._marks.split(text)):
            if i % 2:
                whole.extend(self._found[int(part)])
            elif part or not i:
                whole.tokens += tokens_of(part)
        return Prompt(whole)

    def shown(self, text: str) -> str:
        """A rendered conversation for people to read."""
        return self._marks.sub("<image>", text) if self._found else text


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS
