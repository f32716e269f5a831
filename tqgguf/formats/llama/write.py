"""Writes llama.cpp's session and sequence files from records, slice by slice.

What was parsed comes out as the same bytes. Whether llama.cpp can load a record is its maker's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from tqgguf.formats.atomic import replacing
from tqgguf.formats.llama.format import COLUMN_HEADER, MAGICS, ROW_HEADER, U32
from tqgguf.formats.llama.state import Cells, LayerRows, LlamaState, Stream

SLICE_BYTES = 1 << 22  # of rows that are in memory at a time

_MAGIC_BYTES = {kind: magic for magic, kind in MAGICS.items()}


def write_llama_state(path: str | os.PathLike[str], state: LlamaState) -> None:
    """Write a file for its owner alone, or replace one; errors as `atomic.replacing`."""
    with replacing(path, private=True) as temporary, open(temporary, "wb") as file:
        for piece in pieces(state):
            file.write(piece)


def pieces(state: LlamaState) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in order."""
    yield _MAGIC_BYTES[state.kind] + U32.pack(state.version)
    words = state.tokens if state.packed is None else state.packed.view("<i4")
    yield U32.pack(len(words)) + words.astype("<i4", copy=False).tobytes()
    if state.architecture is not None:
        name = state.architecture.encode("ascii")
        yield U32.pack(len(name)) + name
    for memory in state.memories:
        yield U32.pack(len(memory.streams))
        for stream in memory.streams:
            yield from _stream(stream)
    yield state.trailing.tobytes()


def _stream(stream: Stream) -> Iterator[bytes | memoryview]:
    n_cells = len(stream.cells)
    yield U32.pack(n_cells)
    if not n_cells:
        return
    yield _cells(stream.cells)
    yield U32.pack(stream.v_trans) + U32.pack(len(stream.k))
    for rows in stream.rows():
        yield _header(rows)
        yield from _slices(rows)


def _cells(cells: Cells) -> bytes:
    uniform = cells.uniform
    if uniform is not None:
        table = [cells.positions[:, None], cells.n_sequences[:, None], cells.extra]
        return np.hstack([*table, cells.sequence_ids.reshape(-1, uniform)], dtype="<i4").tobytes()
    ids = np.split(cells.sequence_ids, np.cumsum(cells.n_sequences)[:-1])
    fields = zip(cells.positions[:, None], cells.n_sequences[:, None], cells.extra, ids, strict=True)
    return np.concatenate([part for cell in fields for part in cell], dtype="<i4").tobytes()


def _header(rows: LayerRows) -> bytes:
    if rows.is_transposed:
        return COLUMN_HEADER.pack(rows.type_id, rows.element_bytes, rows.data.shape[0])
    return ROW_HEADER.pack(rows.type_id, rows.row_bytes)


def _slices(rows: LayerRows) -> Iterator[memoryview]:
    n, width = rows.data.shape
    step = max(1, SLICE_BYTES // max(1, width))
    for start in range(0, n, step):
        yield np.ascontiguousarray(rows.data[start : min(start + step, n)]).data
