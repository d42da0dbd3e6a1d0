"""Pictures as people send them: their pixels, within bounds.

libmtmd could decode them itself, by stb_image, which is not made for files of strangers, knows no
WebP and no orientation, and has no bound on pixels but their number's 32 bits.
"""

from __future__ import annotations

import io
import math
import threading
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from dflash_local.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 20 << 20
MOST_PIXELS = 50_000_000
"""Of a picture as it comes: more than a phone's, and 150 MB once decoded."""
_MOST_SEEN = 4 << 20
"""Of a picture as models see it: no model takes more, and larger ones are made smaller."""
_MOST_LONGER = 100
"""How many times as long as wide: models cut pictures into squares."""

_one_at_a_time = threading.Lock()  # so that memory is bounded
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def pixels(data: bytes) -> tuple[int, int, bytes]:
    """Width, height and RGB bytes of a picture: upright, and at most as large as models see.

    Raises InputError for what is no picture, is moving, or exceeds the bounds above.
    """
    if len(data) > MOST_BYTES:
        raise InputError(
            f"an image of {len(data)} bytes; give one of at most {MOST_BYTES >> 20} MiB"
        )
    try:
        with _one_at_a_time, Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check(image)
            image.draft("RGB", (2048, 2048))  # of a JPEG, decodes no more than this takes
            upright = ImageOps.exif_transpose(image).convert("RGB")
            shrunk = math.sqrt(_MOST_SEEN / (upright.width * upright.height))
            if shrunk < 1:
                size = (max(1, int(side * shrunk)) for side in upright.size)
                upright = upright.resize((next(size), next(size)), reducing_gap=2)
            return upright.width, upright.height, upright.tobytes()
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


def _check(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise InputError(
            f"an image of {width} x {height} pixels; give one of at most {MOST_PIXELS:,} in all"
        )
    if max(width, height) > _MOST_LONGER * min(width, height):
        raise InputError(f"an image of {width} x {height} pixels is too narrow a strip")
    if getattr(image, "is_animated", False):
        raise InputError("the image is a moving one; give a single picture")
