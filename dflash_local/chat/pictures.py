"""Pictures in messages: taken out before the template sees them, and put into the prompt."""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_local.chat.quoting import tokenized
from dflash_local.chat.remote_images import RemoteImages
from dflash_local.errors import InputError
from dflash_local.target_model.images import ImageText, Prompt
from dflash_local.target_model.pixels import MOST_BYTES
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

    def __init__(self, projector: Projector | None, remote: RemoteImages | None = None) -> None:
        """With `remote`, addresses of the web are fetched."""
        self._projector = projector
        self._remote = remote
        self._nonce = secrets.token_hex(16)
        self._found: list[ImageText] = []

    def taken_from(self, messages: Any) -> Any:
        """Messages with a mark in place of each picture. Raises InputError for pictures that
        cannot be read, and where there is no projector."""
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            return messages  # `conversation` says what is wrong
        return [self._message(message) for message in messages]

    def _message(self, message: Any) -> Any:
        parts = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(parts, str) or not isinstance(parts, Sequence):
            return message
        if not any(_is_image(part) for part in parts):
            return message
        # As llama-server has it: a line break between texts, and none beside a picture.
        joined: list[Any] = []
        for part in parts:
            is_image, after = _is_image(part), bool(joined) and joined[-1][0]
            text = self._mark(part) if is_image else part
            if not is_image and not (
                isinstance(part, Mapping) and isinstance(part.get("text"), str)
            ):
                return {**message, "content": [p for p in parts if not _is_image(p)]}
            joined.append((is_image, text if is_image else part["text"], after))
        content = ""
        for is_image, text, after in joined:
            content += "\n" if content and not is_image and not after else ""
            content += text
        return {**message, "content": content}

    def _mark(self, part: Mapping[str, Any]) -> str:
        if self._projector is None:
            raise InputError(NO_PROJECTOR)
        n = len(self._found)
        if n == MOST_IMAGES:
            raise InputError(
                f"more than {MOST_IMAGES} images in a request; leave out the first ones"
            )
        self._found.append(self._projector.read(image_bytes(part, self._remote)))
        return f"<{self._nonce}:{n}>"

    def marked(self, text: str, files: Sequence[str]) -> str:
        """A prompt as llama-server has it: with `MARKER` in place of each picture, whose files
        are in base64. Raises InputError, also where there are more of the one than of the other."""
        pieces = text.split(MARKER)
        if len(pieces) != len(files) + 1:
            raise InputError(
                f"{len(files)} images, and {len(pieces) - 1} times {MARKER} in the prompt"
            )
        marks = [self._mark({"image": from_base64(file)}) for file in files]
        return "".join(map("".join, zip(pieces, [*marks, ""], strict=True)))

    @property
    def _marks(self) -> re.Pattern[str]:
        return re.compile(f"<{self._nonce}:([0-9]+)>")

    def tokenized(self, text: str, vocabulary: Vocabulary, n_ctx: int) -> list[int]:
        """Token ids of a rendered conversation: a `Prompt` if there are pictures in it. Raises as
        `quoting.tokenized`."""
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


def image_bytes(part: Mapping[str, Any], remote: RemoteImages | None = None) -> bytes:
    """The file of an image part. Raises InputError: only a caller in Python can name a file, and
    without `remote` nothing is fetched from an address."""
    given = part.get("image_url") if "image_url" in part else part.get("image")
    if isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, str):
        if remote is not None and re.match("https?://", given, re.IGNORECASE):
            return remote.fetch(given)
        return from_data_uri(given)
    if isinstance(given, (bytes, bytearray)):
        return bytes(given)
    if isinstance(given, os.PathLike):
        return image_file(given)
    raise InputError(
        "an image is given as a data URI, data:image/png;base64,..., in image_url's url"
    )


def image_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a picture's file. Raises InputError."""
    try:
        with Path(path).open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: no image can be read: {error.strerror}") from None


def data_uri(data: bytes) -> str:
    """The file of a picture as an address."""
    return f"data:;base64,{base64.b64encode(data).decode()}"


def from_data_uri(uri: str) -> bytes:
    """The bytes in a data URI. Raises InputError for any other address."""
    head, comma, body = uri.partition(",")
    if not head.lower().startswith("data:") or not comma:
        raise InputError(
            f"the image {uri[:40]!r} is not a data URI, and nothing is fetched from elsewhere; "
            "give its content as data:image/png;base64,..."
        )
    if not head.lower().endswith(";base64"):
        raise InputError("the data URI of an image is not in base64; give data:...;base64,...")
    return from_base64(body)


def from_base64(text: str) -> bytes:
    """The bytes of a picture in base64, perhaps in lines. Raises InputError."""
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise InputError(f"an image is too large; give one of at most {MOST_BYTES >> 20} MiB")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InputError("an image is not valid base64") from None
