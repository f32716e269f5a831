"""Checksums of a file's data section: a CRC-32 of each MiB, so that a damaged byte is found and located.

They protect from accidents, from nobody else. As uint32 [1 + n + 1]: of everything before the data section, of each
chunk of it up to the checksums, and last of the entries before.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.gguf.finite import no_progress
from tqgguf.formats.ordered_work import in_order
from tqgguf.formats.snapshots.format import CHUNK_BYTES


def n_entries(n_bytes: int) -> int:
    """Entries for a data section with `n_bytes` before the checksums."""
    return 1 + -(-n_bytes // CHUNK_BYTES) + 1


class Checksummer:
    """Takes a data section piece by piece, after the header before it."""

    def __init__(self, header: bytes | memoryview) -> None:
        self._done = [zlib.crc32(header)]
        self._open, self._length = 0, 0

    def update(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            part, rest = rest[: CHUNK_BYTES - self._length], rest[CHUNK_BYTES - self._length :]
            self._open = zlib.crc32(part, self._open)
            self._length += len(part)
            if self._length == CHUNK_BYTES:
                self._close()

    def entries(self) -> NDArray[np.uint32]:
        """All entries; nothing can be added afterwards."""
        if self._length:
            self._close()
        entries = np.array(self._done, "<u4")
        return np.append(entries, np.array([zlib.crc32(entries.tobytes())], "<u4"))

    def _close(self) -> None:
        self._done.append(self._open)
        self._open, self._length = 0, 0


def damaged(
    file: memoryview,
    data_start: int,
    n_bytes: int,
    entries: NDArray[np.uint32],
    progress: Callable[[int], None] = no_progress,
) -> Iterator[tuple[int, int]]:
    """Byte ranges of `file` whose checksum is another than `entries` says; `n_entries(n_bytes)` of them are there.

    The entries' own range is not known here: (-1, -1) stands for it. progress: called with bytes that were looked at.
    """
    if zlib.crc32(entries[:-1].tobytes()) != entries[-1]:
        yield -1, -1
    if zlib.crc32(file[:data_start]) != entries[0]:
        yield 0, data_start
    end = data_start + n_bytes
    starts = range(data_start, end, CHUNK_BYTES)
    found = in_order(lambda start: zlib.crc32(file[start : min(start + CHUNK_BYTES, end)]), starts)  # without the GIL
    for start, expected, checksum in zip(starts, entries[1:-1], found, strict=True):
        stop = min(start + CHUNK_BYTES, end)
        if checksum != expected:
            yield start, stop
        progress(stop - start)
