"""The lists of tokens in llama.cpp's state files: plain, or packed by its server with the places of media.

A packed list is itself a list of i32 words: -1, u32 version 1, u32 n, the n tokens (-1 where a medium stands), u32 m,
m positions where media begin, and of each medium u32 length and bytes; then zeros up to a whole word.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.cursor import Cursor
from tqgguf.formats.llama.format import PACKED_VERSION, TOKEN_NONE
from tqgguf.formats.rules.table import DefectError

_WORD = 4


def is_packed(words: NDArray[np.int32]) -> bool:
    """Whether a list of tokens is a packed one."""
    return len(words) > 0 and int(words[0]) == TOKEN_NONE


def unpack(cursor: Cursor, n_words: int) -> NDArray[np.int32]:
    """The tokens of a packed list of `n_words` words at the cursor, which then stands behind it.

    DefectError: the list does not add up.
    """
    begin = cursor.position
    end = begin + _WORD * n_words
    cursor.u32("the marker of a packed list of tokens")
    at = cursor.position
    version = _count(cursor, end, "version")
    if version != PACKED_VERSION:
        raise _error(cursor, f"expected version {PACKED_VERSION}, found {version}", at)
    n = _count(cursor, end, "number of tokens", _WORD)
    tokens = np.frombuffer(cursor.buffer, "<i4", n, cursor.position)
    cursor.position += _WORD * n
    at = cursor.position
    n_media = _count(cursor, end, "number of media", _WORD)
    places = np.frombuffer(cursor.buffer, "<u4", n_media, cursor.position)
    if n_media and (places.max() >= n or (np.diff(places.astype(np.int64)) <= 0).any()):
        raise _error(cursor, f"expected media at rising positions below {n}, found them elsewhere", at)
    cursor.position += _WORD * n_media
    for i in range(n_media):
        n_bytes = _count(cursor, end, f"length of medium {i}", 1)
        cursor.position += n_bytes
    rest = end - cursor.position
    if rest >= _WORD or any(cursor.buffer[cursor.position : end]):
        raise _error(cursor, f"expected less than {_WORD} bytes of zeros behind the last medium, found {rest} bytes")
    cursor.position = end
    return tokens


def _count(cursor: Cursor, end: int, what: str, unit: int = 0) -> int:
    """A u32 within the list, and of that many units of bytes behind it."""
    at = cursor.position
    left = end - at
    if left < _WORD:
        raise _error(cursor, f"expected the {what}, found {left} bytes left of the list")
    count = cursor.u32(what)
    if count * unit > left - _WORD:
        message = f"the {what} is {count}, which needs {count * unit} bytes; {left - _WORD} are left of the list"
        raise _error(cursor, message, at)
    return count


def _error(cursor: Cursor, message: str, at: int | None = None) -> DefectError:
    return cursor.error("state-packed-tokens", f"packed tokens: {message}", at)
