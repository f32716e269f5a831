"""The cells of a stream in llama.cpp's state files: positions, and the sequences that they are part of.

Nothing in a file says whether there are more fields between them (M-RoPE): of the layouts that its version has, the one
is taken behind which layers begin.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.cursor import Cursor
from tqgguf.formats.llama.format import (
    CELL_BYTES,
    CELL_FIELDS,
    MAX_LAYERS,
    MAX_ROW_BYTES,
    MAX_SEQUENCES,
    MAX_TYPE_ID,
    ROW_HEADER,
    U32,
)
from tqgguf.formats.llama.state import Cells
from tqgguf.formats.rules.table import DefectError

_WORD = 4


def read_cells(cursor: Cursor, n_cells: int, version: int, where: str) -> Cells:
    """The cells at the cursor, which then stands behind them. DefectError: those of the plain layout are damaged."""
    begin = cursor.position
    failure: DefectError | None = None
    plain: tuple[Cells, int] | None = None
    for n_fields in CELL_FIELDS[version]:
        cursor.position = begin
        try:
            cells = _read(cursor, n_cells, n_fields, where)
        except DefectError as error:
            failure = failure or error
            continue
        if layers_begin(cursor):
            return cells
        if not n_fields:
            plain = cells, cursor.position
    if plain is None:
        assert failure is not None
        raise failure
    cursor.position = plain[1]
    return plain[0]


def layers_begin(cursor: Cursor) -> bool:
    """Whether what stands at the cursor can be the flag of transposed values, the number of layers, and a first one."""
    if cursor.left < 2 * _WORD + ROW_HEADER.size:
        return False
    v_trans, n_layers = (U32.unpack_from(cursor.buffer, cursor.position + i)[0] for i in (0, _WORD))
    type_id, row_bytes = ROW_HEADER.unpack_from(cursor.buffer, cursor.position + 2 * _WORD)
    fits = 0 <= type_id <= MAX_TYPE_ID and 0 < row_bytes <= MAX_ROW_BYTES
    return v_trans <= 1 and 0 < n_layers <= MAX_LAYERS and fits


def _read(cursor: Cursor, n_cells: int, n_fields: int, where: str) -> Cells:
    begin = cursor.position
    cursor.need(n_cells * (CELL_BYTES + _WORD * (n_fields + 1)), f"the {n_cells} cells of {where}", begin - _WORD)
    first = U32.unpack_from(cursor.buffer, begin + _WORD)[0]
    width = 2 + n_fields + min(first, MAX_SEQUENCES)
    if n_cells * width * _WORD <= cursor.left:
        table = np.frombuffer(cursor.buffer, "<i4", n_cells * width, begin).reshape(n_cells, width)
        if 0 < first <= MAX_SEQUENCES and bool((table[:, 1] == first).all()):
            cursor.position += n_cells * width * _WORD
            ids = table[:, 2 + n_fields :].reshape(-1)
            return Cells(table[:, 0], table[:, 1], ids, table[:, 2 : 2 + n_fields], begin)
    return _read_one_by_one(cursor, n_cells, n_fields, where)


def _read_one_by_one(cursor: Cursor, n_cells: int, n_fields: int, where: str) -> Cells:
    """Cells that are part of different numbers of sequences."""
    begin = cursor.position
    words = np.frombuffer(cursor.buffer, "<i4", cursor.left // _WORD, begin)
    fixed = 2 + n_fields
    at = 0
    starts, counts = array("q"), array("i")
    for cell in range(n_cells):
        if at + fixed > len(words):
            cursor.position = begin + at * _WORD
            cursor.need(fixed * _WORD, f"cell {cell} of {n_cells} of {where}")
        count = int(words[at + 1])
        if not 0 < count <= MAX_SEQUENCES:
            found, expected = count & 0xFFFFFFFF, f"1 to {MAX_SEQUENCES}"
            message = f"{where}: expected cell {cell} to be part of {expected} sequences, found {found}"
            raise cursor.error("state-sequence-count", message, begin + (at + 1) * _WORD, expected, found)
        starts.append(at)
        counts.append(count)
        at += fixed + count
    if at > len(words):
        cursor.position = begin + starts[-1] * _WORD
        cursor.need((fixed + counts[-1]) * _WORD, f"the last cell of {where}")
    cursor.position = begin + at * _WORD
    rows, n_sequences = np.asarray(starts, np.intp), np.asarray(counts, np.int32)
    return Cells(
        words[rows],
        n_sequences,
        words[_runs(rows + fixed, n_sequences)],
        words[rows[:, None] + np.arange(2, fixed)],
        begin,
    )


def _runs(starts: NDArray[np.intp], lengths: NDArray[np.int32]) -> NDArray[np.intp]:
    """Indices starts[i], starts[i] + 1, ... of all runs, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
