"""Files as read-only memory: mapped, not copied. What is in them is the readers' business.

A file must not be shortened while it is mapped: the system ends a process that reads a page that is no longer there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat

from tqgguf.formats.errors import TqggufError
from tqgguf.formats.gguf_cursor import Buffer


def map_file(path: str, expected: str) -> Buffer:
    """The whole of a regular file, memory-mapped read-only; b"" for an empty one, which cannot be mapped.

    expected: what the file is to be, for messages. TqggufError: it is not there, not a regular file, or not readable.
    """
    try:
        # without O_NONBLOCK, opening a FIFO would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise TqggufError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TqggufError(f"{path}: expected {expected}, found {_kind(status.st_mode)}")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if status.st_size else b""
    except (OSError, ValueError) as error:
        raise TqggufError(f"{path}: cannot be mapped into memory: {error}") from error
    finally:
        os.close(descriptor)


def _kind(mode: int) -> str:
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

    The bytes stay what they are; a copy that the system holds of the file stays too.
    """
    if isinstance(buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            buffer.madvise(mmap.MADV_DONTNEED, first, last - first)
