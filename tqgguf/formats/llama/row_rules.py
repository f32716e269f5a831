"""Judges the rows of a llama.cpp state file whose structure is sound: values and scales must be finite.

Norms of forks' turbo types may not be negative either. Where the file leaves open how long such a type's blocks are,
whoever knows the profile looks with `bad_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tqgguf.formats.blocks.block_types import BLOCK_TYPES
from tqgguf.formats.gguf.finite import NonFinite, first_bad_norm, first_non_finite, no_progress
from tqgguf.formats.llama.format import ROW_HEADER
from tqgguf.formats.llama.parse import StateError
from tqgguf.formats.llama.profiles import MAINLINE_TYPES, TURBO_FORMS, BlockForm, fork_readings
from tqgguf.formats.llama.state import LayerRows, LlamaState

_MEMORIES = ("base", "window")


def judge_rows(state: LlamaState, progress: Callable[[int], None] = no_progress) -> Iterator[StateError]:
    """One defect for each layer's K or V with a number that cannot be. progress: as of `first_non_finite`."""
    for memory, name in zip(state.memories, _MEMORIES, strict=False):
        for i, stream in enumerate(memory.streams):
            where = f"{name} memory" if len(memory.streams) == 1 else f"{name} memory, stream {i}"
            for side, layers in (("K", stream.k), ("V", stream.v)):
                for layer, rows in enumerate(layers):
                    yield from _bad_rows(state.path, rows, f"{where}, {side} of layer {layer}", progress)


def bad_norm(path: str, rows: LayerRows, what: str, form: BlockForm) -> StateError | None:
    """What is wrong with the norms of turbo blocks of a known layout."""
    found = first_bad_norm(rows.data[0 : rows.data.shape[0]], 0, rows.n_bytes, form.n_bytes)
    return None if found is None else _error(path, rows, what, "norms that are finite and not negative", found)


def _bad_rows(path: str, rows: LayerRows, what: str, progress: Callable[[int], None]) -> Iterator[StateError]:
    data = rows.data[0 : rows.data.shape[0]]
    if rows.type_id in MAINLINE_TYPES:
        found = first_non_finite(data, 0, rows.n_bytes, rows.type_id, progress)
        if found is not None:
            is_float = BLOCK_TYPES[MAINLINE_TYPES[rows.type_id]].family == "float"
            yield _error(path, rows, what, "finite values" if is_float else "finite scales", found)
        return
    possible = {
        form
        for cache_type in fork_readings(rows.type_id, rows.row_bytes).values()
        for form in TURBO_FORMS[cache_type]
        if rows.row_bytes % form.n_bytes == 0
    }
    problem = bad_norm(path, rows, what, possible.pop()) if len(possible) == 1 else None
    if problem is not None:
        yield problem
    progress(rows.n_bytes)


def _error(path: str, rows: LayerRows, what: str, expected: str, bad: NonFinite) -> StateError:
    unit = "block" if "value" not in expected else "value"
    found = f"bits 0x{bad.bits:x} in {unit} {bad.block}"
    more = f" and {bad.count - 1} more" if bad.count > 1 else ""
    at = rows.offset + ROW_HEADER.size + bad.position  # of transposed values the header is as long
    message = f"{what}: expected {expected}, found {found}{more}"
    return StateError("state-non-finite", path, message, offset=at, expected=expected, found=found)
