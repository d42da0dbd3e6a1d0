"""Columns of text from a Parquet file: as much of the format as published prompt sets need.

Flat columns of strings, uncompressed, Snappy or gzip, plain or with a dictionary, in both versions
of data pages; other columns of the file are not touched. Sources: apache/parquet-format
(`parquet.thrift`, `Encodings.md`), the Thrift compact protocol, and Snappy's
`format_description.txt`.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_local.errors import FileError

_MAGIC = b"PAR1"
_STRING = 6  # BYTE_ARRAY
_OPTIONAL = 1
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_PLAIN, _BY_DICTIONARY = 0, (2, 8)
_GZIP = 16 + zlib.MAX_WBITS
_LIMIT = 1 << 30  # bytes of a page
_DAMAGE = (
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    struct.error,
    zlib.error,
)

Fields = dict[int, Any]


def read_texts(path: Path, column: str) -> list[str]:
    """Values of `column`, in order. Raises FileError: no such column, nulls, another format."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise FileError(f"{path}: not a Parquet file")
    try:
        return list(_column(data, column))
    except _Unsupported as error:
        raise FileError(f"{path}: {error}; convert it to .jsonl") from None
    except _DAMAGE as error:
        raise FileError(f"{path}: a damaged Parquet file ({error})") from None


class _Unsupported(Exception):
    """What this reader does not know."""


def _column(data: bytes, column: str) -> Iterator[str]:
    (n_footer,) = struct.unpack_from("<I", data, len(data) - 8)
    footer = _Thrift(data, len(data) - 8 - n_footer).fields()
    schema = footer[2]
    found = [each for each in schema[1:] if each[4].decode() == column]
    if len(found) != 1 or len(schema) != 1 + schema[0][5]:
        names = ", ".join(each[4].decode() for each in schema[1:])
        raise _Unsupported(f"expected a flat column {column!r}, found {names}")
    if found[0].get(1) != _STRING:
        raise _Unsupported(f"column {column!r} is no text")
    optional = found[0].get(3) == _OPTIONAL
    for group in footer[4]:
        (chunk,) = (each[3] for each in group[1] if each[3][3] == [column.encode()])
        for value in _chunk(data, chunk, optional):
            yield value.decode()


def _chunk(data: bytes, meta: Fields, optional: bool) -> Iterator[bytes]:
    place = min(meta[9], meta.get(11, meta[9]))
    left = meta[5]
    dictionary: list[bytes] = []
    while left > 0:
        thrift = _Thrift(data, place)
        header = thrift.fields()
        if header[3] < 0:
            raise ValueError("a page of negative size")
        body = data[thrift.place : thrift.place + header[3]]
        place = thrift.place + header[3]
        if header[1] == _DICTIONARY:
            dictionary = list(_plain(_unpacked(body, meta[4], header[2]), header[7][1]))
        elif header[1] in (_DATA, _DATA_2):
            count, encoding, values = _page(header, body, meta[4], optional)
            left -= count
            yield from _values(values, count, encoding, dictionary)


def _page(header: Fields, body: bytes, codec: int, optional: bool) -> tuple[int, int, bytes]:
    """Count, encoding and bytes of the values of a data page, none of which may be null."""
    if header[1] == _DATA_2:
        about = header[8]
        levels = about[5] + about[6]
        values = body[levels:]
        if about.get(7, True):
            values = _unpacked(values, codec, header[2] - levels)
        if about[2]:
            raise _Unsupported("the column has nulls")
        return about[1], about[4], values
    about = header[5]
    values = _unpacked(body, codec, header[2])
    if optional:
        (n_levels,) = struct.unpack_from("<I", values)
        defined = itertools.islice(_runs(values[4 : 4 + n_levels], 1), about[1])
        if not all(defined):
            raise _Unsupported("the column has nulls")
        values = values[4 + n_levels :]
    return about[1], about[2], values


def _values(values: bytes, count: int, encoding: int, dictionary: list[bytes]) -> Iterator[bytes]:
    if encoding == _PLAIN:
        yield from _plain(values, count)
    elif encoding in _BY_DICTIONARY:
        for index in itertools.islice(_runs(values[1:], values[0]), count):
            yield dictionary[index]
    else:
        raise _Unsupported(f"encoding {encoding} of the column")


def _plain(values: bytes, count: int) -> Iterator[bytes]:
    place = 0
    for _ in range(count):
        (n,) = struct.unpack_from("<I", values, place)
        if place + 4 + n > len(values):
            raise ValueError("a text ends behind its page")
        yield values[place + 4 : place + 4 + n]
        place += 4 + n


def _runs(data: bytes, width: int) -> Iterator[int]:
    """The hybrid of run lengths and packed groups of eight, for numbers of `width` bits."""
    place = 0
    while place < len(data):
        header, place = _varint(data, place)
        if header & 1:
            n_bytes = (header >> 1) * width
            packed = int.from_bytes(data[place : place + n_bytes], "little")
            for i in range((header >> 1) * 8):
                yield packed >> (i * width) & ((1 << width) - 1)
        else:
            n_bytes = (width + 7) // 8
            value = int.from_bytes(data[place : place + n_bytes], "little")
            yield from itertools.repeat(value, header >> 1)
        place += n_bytes


# Compression


def _unpacked(data: bytes, codec: int, size: int) -> bytes:
    if codec not in _CODECS:
        raise _Unsupported(f"compression {codec}, expected none, Snappy or gzip")
    if size > _LIMIT:
        raise ValueError(f"a page of {size} bytes")
    unpacked = _CODECS[codec](data, size)
    if len(unpacked) != size:
        raise ValueError(f"a page of {len(unpacked)} bytes instead of {size}")
    return unpacked


def _gunzip(data: bytes, size: int) -> bytes:
    return zlib.decompressobj(_GZIP).decompress(data, size + 1)


def _unsnap(data: bytes, limit: int) -> bytes:
    size, place = _varint(data, 0)
    if size > limit:
        raise ValueError(f"a page of {size} bytes instead of {limit}")
    out = bytearray()
    while place < len(data) and len(out) <= size:
        tag = data[place]
        place += 1
        kind, n = tag & 3, tag >> 2
        if kind == 0:  # literal bytes
            if n >= 60:
                n_length = n - 59
                n = int.from_bytes(data[place : place + n_length], "little")
                place += n_length
            out += data[place : place + n + 1]
            place += n + 1
            continue
        if kind == 1:  # a copy of what is already there
            back, n, used = (tag >> 5) << 8 | data[place], (n & 7) + 4, 1
        else:
            used = 2 if kind == 2 else 4
            back, n = int.from_bytes(data[place : place + used], "little"), n + 1
        place += used
        if not 0 < back <= len(out):
            raise ValueError("a copy from before the page")
        start = len(out) - back
        while n > 0:  # it may read what it has just written
            part = out[start : start + min(n, back)]
            out += part
            start += len(part)
            n -= len(part)
    return bytes(out)


_CODECS: dict[int, Callable[[bytes, int], bytes]] = {
    0: lambda data, _size: data,
    1: _unsnap,
    2: _gunzip,
}


# Thrift


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


class _Thrift:
    """A struct in the compact protocol, as its fields by number."""

    def __init__(self, data: bytes, place: int) -> None:
        if not 0 <= place < len(data):
            raise ValueError("a place outside the file")
        self._data = data
        self.place = place

    def fields(self, depth: int = 0) -> Fields:
        found: Fields = {}
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                return found
            number = number + (head >> 4) if head >> 4 else self._integer()
            found[number] = self._value(head & 15, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if depth > 16:
            raise ValueError("structs nested too deeply")
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._unsigned())
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            if count > len(self._data):
                raise ValueError("a list longer than the file")
            # in a list, a bool is a byte of its own
            element = 3 if head & 15 in (1, 2) else head & 15
            return [self._value(element, depth + 1) for _ in range(count)]
        if kind == 12:
            return self.fields(depth + 1)
        raise ValueError(f"Thrift type {kind}")

    def _byte(self) -> int:
        self.place += 1
        return self._data[self.place - 1]

    def _unsigned(self) -> int:
        value, self.place = _varint(self._data, self.place)
        return value

    def _integer(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)  # zigzag

    def _bytes(self, n: int) -> bytes:
        self.place += n
        return self._data[self.place - n : self.place]
