"""Bytes of a llama.cpp state file to records, within bounds: nothing is read or allocated on the word of a count alone.

    magic "ggsn" or "ggsq" (u32), u32 version, u32 n_tokens, i32 tokens[n]
    session: u32 length and bytes of the architecture's name
    base memory, and of models with sliding windows the window memory after it:
        u32 n_stream; per stream u32 n_cells, and unless that is 0:
            per cell i32 position, u32 n_sequences, [more fields], i32 sequence_ids[n]
            u32 v_trans, u32 n_layers
            K of every layer: i32 type, u64 row_bytes, n_cells rows
            V of every layer: the same, or where v_trans is 1: i32 type, u32 element_bytes, u32 n_channels, and channel
            by channel n_cells elements

Whether the records make sense is judged in `llama.rules`.
"""

from __future__ import annotations

import numpy as np

from tqgguf.formats.cursor import Buffer, Cursor
from tqgguf.formats.llama.cells import layers_begin, read_cells
from tqgguf.formats.llama.format import (
    COLUMN_HEADER,
    MAGICS,
    MAX_ARCHITECTURE_BYTES,
    MAX_CELLS,
    MAX_LAYERS,
    MAX_ROW_BYTES,
    MAX_STREAMS,
    MAX_TYPE_ID,
    ROW_HEADER,
    U32,
    VERSIONS,
    Kind,
)
from tqgguf.formats.llama.recurrent import begins_recurrent
from tqgguf.formats.llama.state import Cells, LayerRows, LlamaState, Memory, Stream
from tqgguf.formats.llama.tokens import is_packed, unpack
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.wording import shown

_MIN_CELL_BYTES = 12
_MEMORY_NAMES = ("the base memory", "the window memory")


class StateError(DefectError):
    """A llama.cpp state file breaks a rule of its format."""


class StateCursor(Cursor):
    """Reads a llama.cpp state file; what is cut off there is a defect of the state."""

    truncated = "state-truncated"
    failure = StateError


def state_kind(head: bytes | memoryview) -> Kind | None:
    """The kind of state file that begins with these bytes (4 or more), None for other files."""
    return MAGICS.get(bytes(head[:4]))


def parse_state(buffer: Buffer, path: str) -> tuple[LlamaState, StateError | None]:
    """The record of a file, or as far as it could be read and what stopped it.

    StateError: not even its kind, version and tokens can be read.
    """
    cursor = StateCursor(buffer, path)
    kind = state_kind(buffer[:4])
    if kind is None:
        found = shown(bytes(buffer[:4]))
        raise cursor.error("other-format", f"expected a llama.cpp session or sequence file, found {found} at its begin")
    cursor.position = 4
    version = cursor.u32("the version")
    if version not in VERSIONS[kind]:
        known = " or ".join(map(str, VERSIONS[kind]))
        message = f"expected version {known} of a {kind} file, found {version}"
        raise cursor.error("state-version", message, 4, known, version)
    tokens, packed = _tokens(cursor)
    architecture = _architecture(cursor) if kind == "session" else None
    memories: list[Memory] = []
    failure: StateError | None = None
    try:
        while len(memories) < len(_MEMORY_NAMES) and (not memories or _goes_on(cursor, memories[0], version)):
            memories.append(_memory(cursor, version, memories))
    except StateError as error:
        failure = error
    trailing = np.frombuffer(buffer, np.uint8, offset=cursor.position) if cursor.left and failure is None else None
    extra = {} if trailing is None else {"trailing": trailing}
    return LlamaState(path, kind, version, tokens, architecture, tuple(memories), packed, **extra), failure


def _tokens(cursor: Cursor) -> tuple[np.ndarray, np.ndarray | None]:
    """The tokens, and the packed list if it is one."""
    at = cursor.position
    n = cursor.u32("the number of tokens")
    cursor.limit(n, MAX_CELLS, "the number of tokens", at, "state-limit")
    cursor.need(4 * n, f"the {n} tokens", at)
    words = np.frombuffer(cursor.buffer, "<i4", n, cursor.position)
    if not is_packed(words):
        cursor.position += 4 * n
        return words, None
    return unpack(cursor, n), words.view(np.uint8)


def _architecture(cursor: Cursor) -> str:
    at = cursor.position
    length = cursor.u32("the length of the architecture's name")
    cursor.limit(length, MAX_ARCHITECTURE_BYTES, "the length of the architecture's name", at, "state-limit")
    cursor.need(length, "the architecture's name", at)
    raw = cursor.buffer[cursor.position : cursor.position + length]
    if not raw.isascii() or not raw.decode("ascii").isprintable() or not raw:
        message = f"expected the name of an architecture in plain letters, found {shown(raw)}"
        raise cursor.error("state-architecture", message, at, "printable ASCII", shown(raw))
    cursor.position += length
    return raw.decode("ascii")


def _goes_on(cursor: Cursor, base: Memory, version: int) -> bool:
    """Whether a window memory stands behind the base memory: a memory of as many streams, or of another number, but
    then one whose first layers begin where they should. Anything else is trailing bytes.
    """
    if cursor.left < 8:
        return False
    n_streams = U32.unpack_from(cursor.buffer, cursor.position)[0]
    return n_streams == len(base.streams) or _memory_begins(cursor, version)


def _memory_begins(cursor: Cursor, version: int) -> bool:
    """Whether what stands at the cursor can be a memory whose first stream has cells, and layers behind them."""
    begin = cursor.position
    if cursor.left < 8:
        return False
    n_cells = U32.unpack_from(cursor.buffer, begin + 4)[0]
    if not 0 < n_cells <= min(MAX_CELLS, cursor.left // _MIN_CELL_BYTES):
        return False
    cursor.position += 8
    try:
        read_cells(cursor, n_cells, version, _MEMORY_NAMES[1])
        return layers_begin(cursor)
    except DefectError:
        return False
    finally:
        cursor.position = begin


def _memory(cursor: Cursor, version: int, before: list[Memory]) -> Memory:
    begin = cursor.position
    name = _MEMORY_NAMES[len(before)]
    try:
        n_streams = cursor.u32(f"the number of streams of {name}")
        if not 0 < n_streams <= MAX_STREAMS or (before and n_streams != len(before[0].streams)):
            expected = str(len(before[0].streams)) if before else f"1 to {MAX_STREAMS}"
            message = f"{name}: expected {expected} streams, found {n_streams}"
            raise cursor.error("state-streams", message, begin, expected, n_streams)
        return Memory(tuple(_stream(cursor, version, name, i, n_streams) for i in range(n_streams)), begin)
    except StateError as error:
        if begins_recurrent(cursor, begin):
            message = f"{name if not before else 'what follows the base memory'} holds the state of recurrent layers"
            raise cursor.error("state-recurrent", f"{message}; such models are not supported", begin) from error
        raise


def _stream(cursor: Cursor, version: int, name: str, index: int, n_streams: int) -> Stream:
    begin = cursor.position
    where = name if n_streams == 1 else f"{name}, stream {index}"
    n_cells = cursor.u32(f"the number of cells of {where}")
    cursor.limit(n_cells, MAX_CELLS, f"the number of cells of {where}", begin, "state-limit")
    if not n_cells:
        return Stream(Cells.of_sequence(np.empty(0, np.int32)), offset=begin)
    cells = read_cells(cursor, n_cells, version, where)
    at = cursor.position
    v_trans, n_layers = cursor.u32(f"v_trans of {where}"), cursor.u32(f"the number of layers of {where}")
    if v_trans > 1 and not 0 < n_layers <= MAX_LAYERS:
        message = (
            f"{where}: expected v_trans (0 or 1) and 1 to {MAX_LAYERS} layers behind {n_cells} cells, "
            f"found {v_trans} and {n_layers}; the number of cells is wrong, or their layout is unknown"
        )
        raise cursor.error("state-cell-layout", message, at, "v_trans and a number of layers", f"{v_trans}, {n_layers}")
    if v_trans > 1:
        message = f"{where}: expected v_trans to be 0 or 1, found {v_trans}"
        raise cursor.error("state-v-trans", message, at, "0 or 1", v_trans)
    no_layers_is_sound = name == _MEMORY_NAMES[0] and _memory_begins(cursor, version)  # all layers may have windows
    if n_layers > MAX_LAYERS or not (n_layers or no_layers_is_sound):
        message = f"{where}: expected 1 to {MAX_LAYERS} layers, found {n_layers}"
        raise cursor.error("state-layers", message, at + 4, f"1 to {MAX_LAYERS}", n_layers)
    k: list[LayerRows] = []
    for i in range(n_layers):
        k.append(_rows(cursor, n_cells, f"{where}, K of layer {i}", k))
    v: list[LayerRows] = []
    for i in range(n_layers):
        if not cursor.left:
            message = f"{where}: K has {n_layers} layers, and the file ends behind V of {i}: it is cut off" + (
                "" if i else ", or of a model with latent attention (MLA), which has no V"
            )
            raise cursor.error("state-values", message, None, f"V of {n_layers} layers", f"V of {i} layers")
        what = f"{where}, V of layer {i}"
        v.append(_columns(cursor, n_cells, what) if v_trans else _rows(cursor, n_cells, what, v or k))
    return Stream(cells, v_trans, tuple(k), tuple(v), begin)


def _rows(cursor: Cursor, n_cells: int, what: str, before: list[LayerRows]) -> LayerRows:
    begin = cursor.position
    cursor.need(ROW_HEADER.size, f"the type and row size of {what}")
    type_id, row_bytes = ROW_HEADER.unpack_from(cursor.buffer, begin)
    if before and not (0 <= type_id <= MAX_TYPE_ID or 0 < row_bytes <= MAX_ROW_BYTES):
        last = before[-1]
        message = (
            f"what follows {n_cells} rows of {last.row_bytes} bytes is not {what}: type {type_id} with rows of "
            f"{row_bytes} bytes; one of these row sizes is wrong"
        )
        raise cursor.error(
            "state-row-bytes", message, last.offset + 4, "rows behind which a layer begins", last.row_bytes
        )
    _check_row(cursor, row_bytes, f"the row size of {what}", begin + 4)
    cursor.position += ROW_HEADER.size
    cursor.need(n_cells * row_bytes, f"{n_cells} rows of {row_bytes} bytes of {what}")
    data = np.frombuffer(cursor.buffer, np.uint8, n_cells * row_bytes, cursor.position).reshape(n_cells, row_bytes)
    cursor.position += n_cells * row_bytes
    return LayerRows(type_id, data, 0, begin)


def _columns(cursor: Cursor, n_cells: int, what: str) -> LayerRows:
    begin = cursor.position
    cursor.need(COLUMN_HEADER.size, f"the type and element size of {what}")
    type_id, element_bytes, n_channels = COLUMN_HEADER.unpack_from(cursor.buffer, begin)
    if not 0 < element_bytes <= MAX_ROW_BYTES:
        message = f"expected elements of 1 or more bytes of {what}, found {element_bytes}"
        raise cursor.error("state-transposed", message, begin + 4, "1 or more", element_bytes)
    _check_row(cursor, n_channels * element_bytes, f"the row size of {what}", begin + 8)
    cursor.position += COLUMN_HEADER.size
    n_bytes = n_channels * n_cells * element_bytes
    cursor.need(n_bytes, f"{n_channels} channels of {n_cells} elements of {element_bytes} bytes of {what}")
    data = np.frombuffer(cursor.buffer, np.uint8, n_bytes, cursor.position).reshape(n_channels, n_cells * element_bytes)
    cursor.position += n_bytes
    return LayerRows(type_id, data, element_bytes, begin)


def _check_row(cursor: Cursor, row_bytes: int, what: str, at: int) -> None:
    cursor.limit(row_bytes, MAX_ROW_BYTES, what, at, "state-limit")
    if not row_bytes:
        raise cursor.error("state-row-bytes", f"{what} is 0, expected 1 or more bytes", at, "1 or more", 0)
