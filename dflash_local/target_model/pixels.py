"""Pictures as people send them: their pixels, within bounds.

libmtmd could decode them itself, by stb_image, which is not made for files of strangers, knows no
WebP and no orientation, and has no bound on pixels but their number's 32 bits.
"""

import base64
import binascii
import io
import math
import os
import threading
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from dflash_local.errors import InputError
from dflash_local.llama.host import give_back_memory

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 20 << 20
MOST_PIXELS = 20_000_000
"""Of a picture as it comes. Decoding takes 4 to 12 bytes for each."""
_MOST_OF_JPEG = 50_000_000
"""Phones take such photos. They are decoded at half their size, or less."""
_MOST_OF_WEBP = 12_000_000
"""Pillow takes up to 19 bytes for each, as it may be a moving picture."""
_MOST_SEEN = 4 << 20
"""Of a picture as models see it: no model takes more, and larger ones are made smaller."""
_MOST_LONGER = 100
"""The largest ratio of a picture's sides: models cut pictures into squares."""
_MOST_SCANNED = 25 * _MOST_OF_JPEG
"""Pixels of a JPEG times its scans. Each scan goes through all pixels, and a file of 80 kB can have
500 of them. Cameras write one, and programs that want small files about ten."""
_SCAN = b"\xff\xda"
_RUN_LENGTHS = (1, 2)
"""BMP's compressions that Pillow reads in Python: 20 MiB take it ten seconds."""

_KEPT_BYTES = 32 << 20
"""Of pixels, from when a picture is counted until it is computed; else it is decoded again."""
_KEPT_SIZES = 1024
"""Each turn of a chat brings all of its pictures again."""

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def pixels(data: bytes) -> tuple[int, int, bytes]:
    """Width, height and RGB bytes of a picture: upright, and at most as large as models see.

    Raises InputError for a file that is no picture, is moving, or exceeds the bounds above.
    """
    if len(data) > MOST_BYTES:
        raise InputError(
            f"an image of {len(data)} bytes; give one of at most {MOST_BYTES >> 20} MiB"
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check(image, data)
            image.draft("RGB", (2048, 2048))  # of a JPEG, decodes no more than this takes
            seen = _in_rgb(image)
            shrunk = math.sqrt(_MOST_SEEN / (seen.width * seen.height))
            if shrunk < 1:  # before it is turned, which copies it
                width, height = (max(1, int(side * shrunk)) for side in seen.size)
                seen = seen.resize((width, height), reducing_gap=2)
            seen = ImageOps.exif_transpose(seen)
            return seen.width, seen.height, seen.tobytes()
    except (InputError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise InputError(
            f"an image of far too many pixels; give one of at most {MOST_PIXELS:,}"
        ) from None
    except UnidentifiedImageError:
        raise InputError(
            f"the image is none that can be read; give one as {', '.join(FORMATS)}"
        ) from None
    except Exception as error:  # Pillow's readers raise what they come across
        reason = str(error) or type(error).__name__
        raise InputError(f"the image cannot be read: {reason}") from None


class Opener:
    """Opens pictures, one at a time, so that its memory is bounded. `name`: the hash of a file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[bytes, tuple[int, int]] = {}
        self._opened: dict[bytes, tuple[int, int, bytes]] = {}

    def size(self, name: bytes, data: bytes) -> tuple[int, int]:
        """Width and height as models see it. Raises as `pixels`."""
        with self._lock:
            if name not in self._sizes:
                opened = self._opened[name] = _pixels(data)
                self._sizes[name] = opened[:2]
                while sum(len(rgb) for _, _, rgb in self._opened.values()) > _KEPT_BYTES:
                    del self._opened[next(iter(self._opened))]
                if len(self._sizes) > _KEPT_SIZES:
                    del self._sizes[next(iter(self._sizes))]
            return self._sizes[name]

    def take(self, name: bytes, data: bytes) -> tuple[int, int, bytes]:
        """As `pixels`, but keep it no longer."""
        with self._lock:
            return self._opened.pop(name, None) or _pixels(data)


def _pixels(data: bytes) -> tuple[int, int, bytes]:
    """As `pixels`. What a large one took is not kept: hundreds of MiB, which stay in pieces
    otherwise."""
    try:
        return pixels(data)
    finally:
        give_back_memory()


def _in_rgb(image: Image.Image) -> Image.Image:
    """A picture in RGB, white where transparent: else dark text on nothing would be on black."""
    if image.mode.startswith("I"):  # of 16 bits, which `convert` would clip
        return image.point(lambda value: value / 256).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    above = image.convert("RGBA")
    seen = Image.new("RGB", image.size, "white")
    seen.paste(above, mask=above)
    seen.info = image.info  # how it is turned
    return seen


def _check(image: Image.Image, data: bytes) -> None:
    width, height = image.size
    is_jpeg = isinstance(image, JpegImageFile)
    most = _MOST_OF_WEBP if image.format == "WEBP" else MOST_PIXELS
    most = _MOST_OF_JPEG if is_jpeg else most
    if width * height > most:
        raise InputError(
            f"an image of {width} x {height} pixels; give one of at most {most:,} in all"
        )
    if is_jpeg and width * height * (n_scans := data.count(_SCAN)) > _MOST_SCANNED:
        raise InputError(f"an image in {n_scans} scans; save it anew as a plain JPEG")
    if max(width, height) > _MOST_LONGER * min(width, height):
        raise InputError(f"an image of {width} x {height} pixels is too narrow a strip")
    if image.format == "BMP" and image.info.get("compression") in _RUN_LENGTHS:
        raise InputError("the image is a BMP with run lengths; give it as PNG")
    # Phones put a depth map or a preview behind a photo.
    if getattr(image, "is_animated", False) and not is_jpeg:
        raise InputError("the image is a moving one; give a single picture")


def image_file(given: object) -> bytes:
    """The file of a picture: its bytes, a path or a data URI. Raises InputError: only a caller in
    Python can name a file, and nothing is fetched from an address."""
    if isinstance(given, str):
        head, comma, body = given.partition(",")
        if not head.lower().startswith("data:") or not comma:
            raise InputError(
                f"the image {given[:40]!r} is not a data URI, and nothing is fetched from "
                "elsewhere; give its content as data:image/png;base64,..."
            )
        if not head.lower().endswith(";base64"):
            raise InputError("the data URI of an image is not in base64; give data:...;base64,...")
        return from_base64(body)
    if isinstance(given, (bytes, bytearray)):
        return bytes(given)
    if not isinstance(given, os.PathLike):
        raise InputError(
            "an image is given as a data URI, data:image/png;base64,..., in image_url's url"
        )
    try:
        with Path(given).open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{os.fspath(given)}: no image can be read: {error.strerror}") from None


def data_uri(data: bytes) -> str:
    """The file of a picture as an address."""
    return f"data:;base64,{base64.b64encode(data).decode()}"


def from_base64(text: str) -> bytes:
    """The bytes of a picture in base64, perhaps in lines. Raises InputError."""
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise InputError(f"an image is too large; give one of at most {MOST_BYTES >> 20} MiB")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InputError("an image is not valid base64") from None
