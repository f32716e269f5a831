"""Files as read-only memory: mapped, not copied. What is in them is the readers' business.

A file must not be shortened while it is mapped: the system ends a process that reads a page that is no longer there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat

from tqgguf.formats.cursor import Buffer
from tqgguf.formats.errors import TqggufError, words_of

_FOLIO_BYTES = 1 << 21
"""The most that Linux maps at once."""


def map_file(path: str, expected: str) -> Buffer:
    """The whole of a regular file, memory-mapped read-only; b"" for an empty one, which cannot be mapped.

    expected: what the file is to be, for messages. TqggufError: it is not there, not a regular file, or not readable.
    """
    descriptor = _open_regular(path, expected)
    try:
        size = os.fstat(descriptor).st_size
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if size else b""
    except (OSError, ValueError) as error:
        raise TqggufError(f"{path}: cannot be mapped into memory: {words_of(error)}") from error
    finally:
        os.close(descriptor)


def read_head(path: str, n_bytes: int, expected: str) -> bytes:
    """The first bytes of a regular file, fewer if it is shorter. Arguments and errors as `map_file`."""
    descriptor = _open_regular(path, expected)
    try:
        return os.read(descriptor, n_bytes)
    except OSError as error:
        raise TqggufError(f"{path}: cannot be read: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def _open_regular(path: str, expected: str) -> int:
    try:
        # without O_NONBLOCK, opening a FIFO would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise TqggufError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise TqggufError(f"{path}: expected {expected}, found {kind_of_file(mode)}")
    return descriptor


def kind_of_file(mode: int) -> str:
    """What a file is by its mode, in words, if it is no regular one."""
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((kind for test, kind in kinds if test(mode)), "no regular file")


def release(buffer: Buffer) -> None:
    """Let go of a mapping, at once or with the last array that uses it."""
    if isinstance(buffer, mmap.mmap):
        with contextlib.suppress(BufferError):
            buffer.close()


def forget_pages(buffer: Buffer, start: int, stop: int) -> None:
    """Let the system take back the memory of whole pages within a range that will not be read again soon.

    The bytes stay what they are; a copy that the system holds of the file stays too. A little of what lies before goes
    as well: reading a page maps all that the system holds together with it, forgotten pages among them.
    """
    if isinstance(buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        first = -(-max(start - _FOLIO_BYTES, 0) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            buffer.madvise(mmap.MADV_DONTNEED, first, last - first)
