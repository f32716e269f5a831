"""Judges the record of a llama.cpp state file: does what could be read make sense?

Each rule is a generator of errors, not raised: the reader raises the first that is an error, a validator lists all.
Values of rows are not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.gguf.types import ggml_type_name
from tqgguf.formats.llama.format import MAX_SEQUENCES, ROW_HEADER, TOKEN_NONE
from tqgguf.formats.llama.parse import StateError
from tqgguf.formats.llama.profiles import MAINLINE_TYPES, PROFILES, fork_readings
from tqgguf.formats.llama.state import Cells, LayerRows, LlamaState, Stream

_TOKENS_AT = 12
_MEMORIES = ("base", "window")
_TYPE_BYTES = 4
_ELEMENT_BYTES = 4


def judge_state(state: LlamaState) -> Iterator[StateError]:
    """All that is wrong with a record, in the order of the file."""
    yield from _tokens(state)
    for memory, name in zip(state.memories, _MEMORIES, strict=False):
        for i, stream in enumerate(memory.streams):
            where = f"{name} memory" if len(memory.streams) == 1 else f"{name} memory, stream {i}"
            yield from _cells(state, stream.cells, where)
            yield from _layers(state, stream, where)
        yield from _same_layers(state, [stream for stream in memory.streams if stream.k], name)
    yield from _window(state)
    yield from _trailing(state)


def sequences(cells: Cells) -> list[int]:
    """Ids of the sequences that have cells."""
    return [int(i) for i in np.unique(cells.sequence_ids)]


def _tokens(state: LlamaState) -> Iterator[StateError]:
    lowest = 0 if state.packed is None else TOKEN_NONE
    wrong = np.flatnonzero(state.tokens < lowest)
    if len(wrong):
        first = int(wrong[0])
        at = _TOKENS_AT + 4 * first if state.packed is None else None
        message = f"expected token {first} to be {lowest} or more, found {state.tokens[first]}{_more(wrong)}"
        yield _error(state, "state-token", message, at, f"{lowest} or more", int(state.tokens[first]))
    n_tokens, n_cells = len(state.tokens), state.n_cells
    one_sequence = bool(state.memories) and len(state.memories[0].streams) == 1
    one_sequence = one_sequence and len(sequences(state.memories[0].streams[0].cells)) == 1
    if n_cells and one_sequence and not n_cells <= n_tokens <= n_cells + 1:
        expected = f"{n_cells} or {n_cells + 1}"
        message = f"expected {expected} tokens for {n_cells} cells, found {n_tokens}"
        yield _error(state, "state-token-count", message, _TOKENS_AT - 4, expected, n_tokens)


def _cells(state: LlamaState, cells: Cells, where: str) -> Iterator[StateError]:
    wrong = np.flatnonzero(cells.positions < 0)
    if len(wrong):
        first = int(wrong[0])
        message = f"{where}: expected cell {first} at position 0 or more, found {cells.positions[first]}{_more(wrong)}"
        yield _error(state, "state-position", message, cells.offset_of(first), "0 or more", int(cells.positions[first]))
    wrong = np.flatnonzero(cells.n_sequences != 1)
    if state.kind == "sequence" and len(wrong):
        first = int(wrong[0])
        found = int(cells.n_sequences[first])
        message = f"{where}: expected cell {first} to be part of one sequence, found {found}{_more(wrong)}"
        yield _error(state, "state-sequence-count", message, cells.offset_of(first) + 4, 1, found)
    wrong = np.flatnonzero((cells.sequence_ids < 0) | (cells.sequence_ids >= MAX_SEQUENCES))
    if len(wrong):
        found = int(cells.sequence_ids[wrong[0]])
        cell = int(np.searchsorted(np.cumsum(cells.n_sequences), wrong[0], side="right"))
        at = cells.offset_of(cell) + 8 + 4 * cells.extra.shape[1]
        message = (
            f"{where}: expected sequence ids from 0 to {MAX_SEQUENCES - 1} in cell {cell}, found {found}{_more(wrong)}"
        )
        yield _error(state, "state-sequence-id", message, at, f"0 to {MAX_SEQUENCES - 1}", found)
        return
    if not cells.extra.shape[1]:  # tokens of a picture share a position
        for sequence in sequences(cells):
            yield from _run(state, cells, cells.of(sequence), f"{where}, sequence {sequence}")


def _run(state: LlamaState, cells: Cells, members: NDArray[np.intp], where: str) -> Iterator[StateError]:
    """Positions of one sequence: no two the same, none missing between others."""
    order = members[np.argsort(cells.positions[members], kind="stable")]
    positions = cells.positions[order].astype(np.int64)
    steps = np.diff(positions)
    same = np.flatnonzero(steps == 0)
    if len(same):
        first, second = int(order[same[0]]), int(order[same[0] + 1])
        message = f"{where}: cells {first} and {second} are both at position {positions[same[0]]}{_more(same)}"
        yield _error(state, "state-duplicate-position", message, cells.offset_of(second))
    gaps = np.flatnonzero(steps > 1)
    if len(gaps):
        after, before = int(positions[gaps[0]]), int(positions[gaps[0] + 1])
        message = f"{where}: no cell between positions {after} and {before}{_more(gaps)}"
        yield _error(state, "state-gap", message, cells.offset_of(int(order[gaps[0] + 1])))


def _layers(state: LlamaState, stream: Stream, where: str) -> Iterator[StateError]:
    forks: Counter[int] = Counter()
    for side, layers in (("K", stream.k), ("V", stream.v)):
        for i, rows in enumerate(layers):
            what = f"{where}, {side} of layer {i}"
            readings = fork_readings(rows.type_id, rows.row_bytes)
            if rows.type_id in MAINLINE_TYPES:
                yield from _mainline_rows(state, rows, what)
            elif not any(rows.type_id in profile.turbo_types for profile in PROFILES.values()):
                yield _unknown(state, rows, what)
            elif not readings:
                message = f"{what}: rows of {rows.row_bytes} bytes fit no fork's type {rows.type_id}"
                at = rows.offset + _TYPE_BYTES
                yield _error(state, "state-row-bytes", message, at, "whole blocks", rows.row_bytes)
            elif rows.type_id not in forks:
                names = ", ".join(f"{name}: {cache_type}" for name, cache_type in readings.items())
                message = (
                    f"{what}: type {rows.type_id} is none of llama.cpp's; "
                    f"rows of {rows.row_bytes} bytes fit profile {names}"
                )
                yield _error(state, "state-fork-type", message, rows.offset, "a type of llama.cpp", rows.type_id)
            forks[rows.type_id] += 1


def _unknown(state: LlamaState, rows: LayerRows, what: str) -> StateError:
    name = ggml_type_name(rows.type_id)
    known = ", ".join(MAINLINE_TYPES.values())
    message = f"{what}: expected a type that caches have ({known}) or a known fork's, found {name}"
    return _error(state, "state-type", message, rows.offset, "a type that caches have", rows.type_id)


def _mainline_rows(state: LlamaState, rows: LayerRows, what: str) -> Iterator[StateError]:
    block_type = BLOCK_TYPES[MAINLINE_TYPES[rows.type_id]]
    name, block_bytes = block_type.name, block_type.block_bytes
    if not rows.is_transposed:
        if rows.row_bytes % block_bytes:
            message = (
                f"{what}: expected rows of whole {name} blocks of {block_bytes} bytes, found {rows.row_bytes} bytes"
            )
            at = rows.offset + _TYPE_BYTES
            yield _error(state, "state-row-bytes", message, at, f"a multiple of {block_bytes}", rows.row_bytes)
    elif block_type.family != "float":
        message = f"{what}: transposed values cannot be of the quantised type {name}"
        yield _error(state, "state-transposed", message, rows.offset, "a float type", name)
    elif rows.element_bytes != block_bytes:
        message = f"{what}: expected elements of {block_bytes} bytes ({name}), found {rows.element_bytes}"
        yield _error(state, "state-transposed", message, rows.offset + _TYPE_BYTES, block_bytes, rows.element_bytes)


def _same_layers(state: LlamaState, streams: list[Stream], name: str) -> Iterator[StateError]:
    for stream in streams[1:]:
        expected, found = len(streams[0].k), len(stream.k)
        if found != expected:
            at = stream.k[0].offset - _ELEMENT_BYTES
            message = f"{name} memory: expected {expected} layers in every stream, found {found}"
            yield _error(state, "state-layers", message, at, expected, found)


def _window(state: LlamaState) -> Iterator[StateError]:
    if not state.has_window_memory:
        return
    for base, window in zip(state.memories[0].streams, state.memories[1].streams, strict=True):
        if len(base.cells) and (not len(window.cells) or base.cells.positions.max() != window.cells.positions.max()):
            expected = int(base.cells.positions.max())
            found = int(window.cells.positions.max()) if len(window.cells) else "no cells"
            message = f"window memory: expected its last position to be the base memory's, {expected}, found {found}"
            yield _error(state, "state-window", message, window.offset, expected, found)


def _trailing(state: LlamaState) -> Iterator[StateError]:
    n = len(state.trailing)
    if n and state.memories:
        code = "state-trailing" if state.kind == "session" else "state-trailing-sequence"
        at = _end(state)
        message = f"expected the end of the file behind the last memory, {n} bytes are left"
        yield _error(state, code, message, at, "0 bytes left", f"{n} bytes left")


def _end(state: LlamaState) -> int:
    """Offset behind the last memory."""
    stream = state.memories[-1].streams[-1]
    last = (stream.v or stream.k)[-1] if stream.k else None
    if last is None:
        return stream.offset + 4
    header = ROW_HEADER.size  # of transposed values the same
    return last.offset + header + last.n_bytes


def _error(
    state: LlamaState, code: str, message: str, at: int | None, expected: object = None, found: object = None
) -> StateError:
    return StateError(code, state.path, message, offset=at, expected=expected, found=found)


def _more(wrong: NDArray[np.intp]) -> str:
    return f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
