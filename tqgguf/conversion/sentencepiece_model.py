"""Reads the pieces of a SentencePiece model (tokenizer.model): text, score and type of each.

The file is a protocol buffer, of which only the repeated field `pieces` of the message is looked at (sentencepiece's
sentencepiece_model.proto); whatever else it holds is passed over. What the pieces are good for is not known here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from tqgguf.formats.errors import FormatError, words_of
from tqgguf.formats.json_file import read_bytes

_PIECES: Final = 1  # field numbers
_PIECE, _SCORE, _TYPE = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10


class PieceType(IntEnum):
    """Types of pieces, by sentencepiece's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """One piece; its number is its place in the list."""

    text: str
    score: float = 0.0
    type: PieceType = PieceType.NORMAL


def read_pieces(path: Path) -> list[Piece]:
    """The pieces of a file; FormatError where it is not there or no SentencePiece model."""
    data = read_bytes(path)
    try:
        pieces = [_piece(value) for field, value in _fields(data) if field == _PIECES and isinstance(value, bytes)]
    except (ValueError, struct.error) as error:
        raise FormatError(f"{path}: expected a SentencePiece model, found a mistake: {words_of(error)}") from error
    if not pieces:
        raise FormatError(f"{path}: expected a SentencePiece model, found one without pieces")
    return pieces


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    text, score, kind = fields.get(_PIECE, b""), fields.get(_SCORE, bytes(4)), fields.get(_TYPE, PieceType.NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece with fields of other types")
    return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], PieceType(kind))


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Field numbers and values of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            number, at = _varint(data, at)
            yield field, number
            continue
        if wire == _BYTES:
            n_bytes, at = _varint(data, at)
        elif wire in _FIXED:
            n_bytes = _FIXED[wire]
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if n_bytes > len(data) - at:
            raise ValueError(f"a field of {n_bytes} bytes at byte {at}, where {len(data) - at} are left")
        yield field, data[at : at + n_bytes]
        at += n_bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, and where it ends."""
    number = 0
    for i in range(_MAX_VARINT_BYTES):
        if at + i >= len(data):
            raise ValueError(f"the file ends within a number at byte {at}")
        number |= (data[at + i] & 127) << (7 * i)
        if data[at + i] < 128:
            return number, at + i + 1
    raise ValueError(f"a number without an end at byte {at}")
