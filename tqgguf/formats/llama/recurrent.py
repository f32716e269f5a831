"""Recognises the state of recurrent layers in llama.cpp's state files, so that it can be refused by name.

u32 n_cells; per cell i32 position, u32 n_sequences, i32 sequence_ids[n]; u32 0, u32 n_layers; i32 type, u64 row_bytes
and rows of each layer. (One memory of a hybrid model stands behind that of its attention layers.)
"""

from __future__ import annotations

from tqgguf.formats.cursor import Cursor
from tqgguf.formats.llama.cells import layers_begin
from tqgguf.formats.llama.format import CELL_BYTES, MAX_SEQUENCES, MAX_STREAMS, U32


def begins_recurrent(cursor: Cursor, position: int) -> bool:
    """Whether what stands at a position can be the memory of recurrent layers. The cursor stays where it is."""
    kept, cursor.position = cursor.position, position
    try:
        return _begins(cursor)
    finally:
        cursor.position = kept


def _begins(cursor: Cursor) -> bool:
    if cursor.left < 4:
        return False
    n_cells = U32.unpack_from(cursor.buffer, cursor.position)[0]
    cursor.position += 4
    if not 0 < n_cells <= MAX_STREAMS:
        return False
    for _ in range(n_cells):
        if cursor.left < CELL_BYTES:
            return False
        n_sequences = U32.unpack_from(cursor.buffer, cursor.position + 4)[0]
        if n_sequences > MAX_SEQUENCES:
            return False
        cursor.position += CELL_BYTES + 4 * n_sequences
    return layers_begin(cursor)
