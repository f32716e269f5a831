"""Writes GGUF files: entries and tensor lists as bytes, data in pieces, so that nothing is there twice.

An entry that was read from a file can be written as it stood there, byte for byte; what it means is not known here.
Files are little-endian and of version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from tqgguf.formats.gguf.parse import SCALARS
from tqgguf.formats.gguf.rules import padded
from tqgguf.formats.gguf.types import DEFAULT_ALIGNMENT, MAGIC, VALUE_DTYPES, VERSION, MetadataType, ValueType

Piece = bytes | memoryview


@dataclass(frozen=True)
class GgufTensor:
    """One tensor to be written. `shape` is in numpy's order; `pieces` gives the data when its turn comes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_bytes: int
    pieces: Callable[[], Iterable[Piece]]

    @property
    def record_bytes(self) -> int:
        """Bytes of its entry in the tensor list."""
        return len(_text(self.name)) + 4 + 8 * len(self.shape) + 4 + 8


def entry(key: str, value_type: MetadataType, value: Any) -> bytes:
    """One metadata entry. value: int, float, bool or str; of arrays a sequence of those (no arrays in arrays)."""
    head = _text(key) + struct.pack("<I", value_type.value)
    if value_type.element is None:
        return head + _scalar(value_type.value, value)
    head += struct.pack("<IQ", value_type.element, len(value))
    if value_type.element is ValueType.STRING:
        return head + b"".join(_text(text) for text in value)
    return head + np.asarray(value).astype(VALUE_DTYPES[value_type.element]).tobytes()


def text_entry(key: str, value: str) -> bytes:
    """A metadata entry that holds a string."""
    return entry(key, MetadataType(ValueType.STRING), value)


def u32_entry(key: str, value: int) -> bytes:
    """A metadata entry that holds an unsigned number of 32 bits."""
    return entry(key, MetadataType(ValueType.U32), value)


def header(entries: Sequence[Piece], tensors: Sequence[GgufTensor], alignment: int = DEFAULT_ALIGNMENT) -> bytes:
    """All that comes before the data: magic, entries, tensor list, padding."""
    parts: list[Piece] = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(entries)), *entries]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        parts.append(_text(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(struct.pack("<IQ", tensor.ggml_type, offset))
        offset += padded(tensor.n_bytes, alignment)
    data = b"".join(parts)
    return data.ljust(padded(len(data), alignment), b"\0") if tensors else data


def size_of_file(entries: Iterable[Piece], tensors: Iterable[GgufTensor], alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Bytes of the file that `write_gguf` would make."""
    tensors = list(tensors)
    head = len(MAGIC) + 4 + 8 + 8 + sum(map(len, entries)) + sum(tensor.record_bytes for tensor in tensors)
    if not tensors:
        return head
    return padded(head, alignment) + sum(padded(tensor.n_bytes, alignment) for tensor in tensors)


def write_gguf(
    file: BinaryIO,
    entries: Sequence[Piece],
    tensors: Sequence[GgufTensor],
    alignment: int = DEFAULT_ALIGNMENT,
    written: Callable[[int], None] = lambda n_bytes: None,
) -> None:
    """Write a whole file; `written` is told of each piece's size. OSError where it cannot be written."""
    file.write(header(entries, tensors, alignment))
    for tensor in tensors:
        n_bytes = 0
        for piece in tensor.pieces():
            file.write(piece)
            n_bytes += len(piece)
            written(len(piece))
        assert n_bytes == tensor.n_bytes, f"{tensor.name}: {n_bytes} bytes instead of {tensor.n_bytes}"
        file.write(bytes(padded(n_bytes, alignment) - n_bytes))


def _scalar(value_type: ValueType, value: Any) -> bytes:
    return _text(value) if value_type is ValueType.STRING else SCALARS[value_type].pack(value)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data
