"""Pictures of strangers: read within bounds, or refused in one line."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dflash_local.errors import InputError
from dflash_local.target_model.pixels import MOST_BYTES, MOST_PIXELS, Opener, pixels
from vision_models import picture


def _saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _png(width: int, height: int) -> bytes:
    """A PNG whose header says this size, with the pixels of one row."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1 + 3 * min(width, 64)))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_picture_of_each_format_is_read(kind: str) -> None:
    width, height, rgb = pixels(picture(30, 20, kind=kind))
    assert (width, height, len(rgb)) == (30, 20, 30 * 20 * 3)


def test_a_picture_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by 90 degrees
    assert pixels(_saved(Image.new("RGB", (30, 20)), "JPEG", exif=exif))[:2] == (20, 30)
    width, height, _ = pixels(_saved(Image.new("RGB", (4000, 2000)), exif=exif))
    assert width < height < 4000


def test_a_picture_of_twenty_megapixels_is_made_smaller() -> None:
    width, height, rgb = pixels(_saved(Image.new("RGB", (5000, 4000), (10, 200, 30)), "JPEG"))
    assert width * height <= 1 << 22
    assert abs(width / height - 1.25) < 0.01
    assert len(rgb) == 3 * width * height


def test_transparent_and_grey_pictures_have_three_colours() -> None:
    for mode in ("RGBA", "LA", "L", "P", "1", "I;16"):
        assert len(pixels(_saved(Image.new(mode, (8, 8))))[2]) == 8 * 8 * 3


def test_what_is_transparent_is_white() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    drawn = Image.new("RGBA", (30, 20))
    drawn.putpixel((0, 0), (0, 0, 0, 255))
    width, height, rgb = pixels(_saved(drawn, exif=exif))
    assert (width, height) == (20, 30)
    assert rgb.count(0) == 3 and rgb.count(255) == len(rgb) - 3
    palette = Image.new("P", (8, 8))
    palette.putpalette([0, 0, 0])
    for data in (
        _saved(palette, transparency=0),
        _saved(palette, "GIF", transparency=0),
        _saved(Image.new("LA", (8, 8))),
        _saved(Image.new("L", (8, 8)), transparency=0),
        _saved(Image.new("RGBA", (8, 8)), "WEBP", lossless=True),
    ):
        assert set(pixels(data)[2]) == {255}


def test_sixteen_bits_are_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    assert list(pixels(_saved(Image.fromarray(ramp)))[2][::3]) == list(range(256))


def test_a_photo_with_a_preview_behind_it_is_no_moving_picture() -> None:
    photo, preview = Image.new("RGB", (64, 48), (200, 10, 10)), Image.new("RGB", (16, 12))
    data = _saved(photo, "MPO", save_all=True, append_images=[preview])
    width, height, rgb = pixels(data)
    assert (width, height) == (64, 48)
    assert min(rgb[::3]) > 190
    large = _saved(Image.new("L", (6000, 4000)), "MPO", save_all=True, append_images=[preview])
    assert pixels(large)[0] < 6000


def _run_lengths() -> bytes:
    runs = b"\x08\x01\x00\x00" * 8 + b"\x00\x01"
    head = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 8, 1, len(runs), 0, 0, 256, 0)
    begin = 14 + len(head) + 1024
    file = struct.pack("<2sIHHI", b"BM", begin + len(runs), 0, 0, begin)
    return file + head + bytes(1024) + runs


def _in_scans() -> bytes:
    """A JPEG whose last scan is there 500 times."""
    data = _saved(Image.new("L", (2000, 2000)), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 500 + data[-2:]


def _moving() -> bytes:
    first, *more = (Image.new("RGB", (8, 8), (i, 0, 0)) for i in (0, 200))
    return _saved(first, "GIF", save_all=True, append_images=more)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "none that can be read"),
        (lambda: _saved(Image.new("CMYK", (8, 8)), "TIFF"), "none that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none that can be read"),
        (picture()[:60], "cannot be read"),
        (_png(100_000, 100_000), "far too many pixels"),
        (_png(60, 60)[:50], "cannot be read"),
        (picture(200, 1), "too narrow"),
        (_moving(), "a moving one"),
        (_run_lengths(), "run lengths"),
        (_in_scans, "scans; save it anew"),
        (lambda: _saved(Image.new("L", (4000, 3001)), "WEBP", method=0), "at most 12,000,000"),
        (bytes(MOST_BYTES + 1), "at most 20 MiB"),
    ],
)
def test_other_files_are_refused_in_a_line(data: bytes | Callable[[], bytes], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        pixels(data if isinstance(data, bytes) else data())
    assert "\n" not in str(caught.value)


def test_a_size_is_refused_before_any_pixel_is_read() -> None:
    side = int(MOST_PIXELS**0.5) + 1
    with pytest.raises(InputError, match="give one of at most"):
        pixels(_png(side, side))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_files_are_read_or_refused(kind: str) -> None:
    whole = np.frombuffer(picture(40, 30, kind=kind), np.uint8)
    random = np.random.default_rng(1)
    n_refused = 0
    for _ in range(80):
        data = whole.copy()
        places = random.integers(0, len(data), 4)
        data[places] = random.integers(0, 256, 4)
        try:
            width, height, rgb = pixels(data.tobytes())
        except InputError:
            n_refused += 1
        else:
            assert len(rgb) == 3 * width * height
    assert n_refused < 80


def test_a_picture_is_opened_once_until_it_is_computed() -> None:
    opener, shown = Opener(), picture(30, 20)
    assert opener.size(b"name", shown) == (30, 20)
    assert opener.take(b"name", b"not opened") == pixels(shown)
    with pytest.raises(InputError):
        opener.take(b"name", b"opened again")
    assert opener.size(b"name", b"its size is known") == (30, 20)


def test_the_pixels_of_few_pictures_are_kept() -> None:
    opener, shown = Opener(), picture(2048, 2048)
    for name in (b"0", b"1", b"2", b"3"):
        opener.size(name, shown)
    with pytest.raises(InputError):
        opener.take(b"0", b"given up")
    assert opener.take(b"3", b"not opened") == pixels(shown)
