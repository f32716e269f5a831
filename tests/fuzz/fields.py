"""Where the fields of small sound files stand, so that every one of them can be given every value worth trying.

GGUF is walked by plain struct unpacking, independent of tqgguf's parser; llama.cpp's files say it themselves when they
are built; of safetensors the header is taken apart as JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from gguf_builder import ARRAY, PACKING, STRING

Field = tuple[int, int]  # offset, bytes

VALUES = (
    0, 1, 2, 3, 5, 7, 8, 9, 12, 13, 31, 32, 33, 64, 99, 127, 128, 255, 256, 4096, 65535, 65536, (1 << 20) + 1, 1 << 24,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 42, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 32,
    (1 << 64) - 1,
)  # fmt: skip
"""Of counts, lengths, types, offsets and dimensions: small ones, and all edges of all widths."""

JSON_VALUES = (
    None, True, 0, 1, -1, 1.5, 7, 1 << 31, 1 << 63, 1 << 70, "", "F32", "F99", "\ud800", [], {}, [0], [8, 0],
    [0, 1 << 63], [[]],
)  # fmt: skip


def gguf_fields(data: bytes) -> Iterator[Field]:
    """Of a sound GGUF: header, every entry and every tensor's record; texts as one field each."""
    yield from ((0, 4), (4, 4), (8, 8), (16, 8))
    n_tensors, n_entries = struct.unpack_from("<QQ", data, 8)
    at = 24
    for _ in range(n_entries):
        at = yield from _text(data, at)
        yield at, 4
        (kind,) = struct.unpack_from("<I", data, at)
        at = yield from _value(data, at + 4, kind)
    for _ in range(n_tensors):
        at = yield from _text(data, at)
        yield at, 4
        (n_dims,) = struct.unpack_from("<I", data, at)
        for i in range(n_dims):
            yield at + 4 + 8 * i, 8
        at += 4 + 8 * n_dims
        yield at, 4
        yield at + 4, 8
        at += 12


def _text(data: bytes, at: int) -> Iterator[Field]:
    yield at, 8
    (length,) = struct.unpack_from("<Q", data, at)
    yield at + 8, min(length, 2)
    return at + 8 + length


def _value(data: bytes, at: int, kind: int) -> Iterator[Field]:
    if kind == STRING:
        return (yield from _text(data, at))
    if kind != ARRAY:
        size = struct.calcsize(PACKING[kind])
        yield at, size
        return at + size
    yield at, 4
    yield at + 4, 8
    element, count = struct.unpack_from("<IQ", data, at)
    at += 12
    for i in range(count):
        inner = list(_value(data, at, element)) if i >= 2 else None  # two elements stand for all
        at = _end(data, at, element) if inner is not None else (yield from _value(data, at, element))
    return at


def _end(data: bytes, at: int, kind: int) -> int:
    walk = _value(data, at, kind)
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value


def with_value(data: bytes, field: Field, value: int) -> bytes:
    """The file with a number in a field, cut to its width."""
    at, width = field
    return data[:at] + (value & (1 << 8 * width) - 1).to_bytes(width, "little") + data[at + width :]


def safetensors_variants(data: bytes) -> Iterator[bytes]:
    """A sound safetensors file with every value of its header replaced, dropped, or doubled."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    for changed in _replaced(header):
        text = json.dumps(changed).encode("utf-8", "surrogatepass")
        yield struct.pack("<Q", len(text)) + text + rest
    for value in VALUES:
        yield struct.pack("<Q", value) + data[8:]


def _replaced(value: Any) -> Iterator[Any]:
    yield from JSON_VALUES
    if isinstance(value, dict):
        for key in value:
            rest = {name: each for name, each in value.items() if name != key}
            yield rest
            yield from (rest | {key: changed} for changed in _replaced(value[key]))
    elif isinstance(value, list):
        yield value[1:]
        yield value + value
        for i in range(len(value)):
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in _replaced(value[i]))
