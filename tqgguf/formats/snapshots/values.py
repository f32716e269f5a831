"""Which numbers a snapshot may not hold: what `validate` finds in a file, and what is never written into one.

Structure is `snapshot.side_problems`', which comes first. Rows are streamed in slices, each looked at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.finite import no_progress
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, SideSnapshot, Snapshot
from tqgguf.formats.wording import readable

_FLOAT_DTYPES: dict[str, Any] = {"f32": np.dtype("<u4"), "f16": np.dtype("<u2"), "bf16": np.dtype("<u2")}
_EXPONENTS = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}


class ValueProblem(NamedTuple):
    """A number that may not be: the rule it breaks, the field of `SideSnapshot`, its byte in that, and what it is."""

    rule: str
    part: str
    at: int
    message: str


def check_values(snapshot: Snapshot) -> None:
    """FormatError for the first number that no file may hold. Reads every row once."""
    for layer in snapshot.layers:
        for side in SIDES:
            for problem in chain(part_problems(layer, side), row_problems(layer, side)):
                raise _refusal(layer, side, problem)


@contextlib.contextmanager
def not_written(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says of a FormatError within which file was not written for it."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{readable(os.fsdecode(path))}: not written: {error}") from error


def check_parts(snapshot: Snapshot) -> None:
    """`check_values` of all but the rows, which `checked_slices` looks at."""
    for layer in snapshot.layers:
        for side in SIDES:
            for problem in chain(part_problems(layer, side), _prefix_problems(layer, side)):
                raise _refusal(layer, side, problem)


def checked_slices(layer: LayerSnapshot, side: Side) -> Iterator[NDArray[np.uint8]]:
    """`SideSnapshot.slices`, each looked at before it is handed out. FormatError as `check_values`."""
    held, token = layer.side(side), 0
    for rows in held.slices():
        problem = _bad_row(layer, held, rows, token)
        if problem is not None:
            raise _refusal(layer, side, problem)
        token += len(rows)
        yield rows


def _refusal(layer: LayerSnapshot, side: Side, problem: ValueProblem) -> FormatError:
    return FormatError(f"layer {layer.layer}, {side.upper()}, {problem.part}: {problem.message}")


def part_problems(layer: LayerSnapshot, side: Side) -> Iterator[ValueProblem]:
    """Numbers of parts must be sound. While page 0 is the tail, it holds the exact prefix too: the same values."""
    held = layer.side(side)
    for part, array in held.parts():
        sound = part.is_sound(array)
        if not sound.all():
            i = int(np.argmin(sound))
            message = f"value {i}: expected {part.expected}, found {array.reshape(-1)[i]}"
            yield ValueProblem("part-value", part.name, i * array.itemsize, message)
    if held.prefix is None or held.tail is None or layer.start or held.rows.shape[0]:
        return
    n = min(len(held.prefix), len(held.tail))
    pair = (np.ascontiguousarray(part[:n]).view(np.uint16) for part in (held.prefix, held.tail))
    differs = np.not_equal(*pair).reshape(-1)
    if differs.any():
        i = int(np.argmax(differs))
        message = f"value {i}: expected that of the tail, whose first tokens these are, found another"
        yield ValueProblem("part-value", "prefix", 2 * i, message)


def row_problems(
    layer: LayerSnapshot, side: Side, progress: Callable[[int], None] = no_progress
) -> Iterator[ValueProblem]:
    """Rows of the exact prefix must be zero blocks, scales and floats finite, an open page within f16. progress: called
    with 0 on the way."""
    held = layer.side(side)
    yield from _prefix_problems(layer, side)
    token = 0
    for rows in held.slices():
        problem = _bad_row(layer, held, rows, token)
        if problem is not None:
            yield problem
            return  # one for each tensor: a damaged one may have millions
        token += len(rows)
        progress(0)
    try:
        held.open_page(layer.start)
    except FormatError as error:
        page = max(0, token - (layer.start + token) % PAGE_TOKENS)
        yield ValueProblem("part-value", "rows", page * held.rows.shape[1] * held.rows.shape[2], str(error))


def _prefix_problems(layer: LayerSnapshot, side: Side) -> Iterator[ValueProblem]:
    held = layer.side(side)
    n = 0 if held.codec.is_float or held.prefix is None else min(len(held.prefix), held.rows.shape[0])
    if not n or layer.start:
        return
    zero = held.codec.encode(np.zeros((1, held.codec.head_dim), np.float32))[0]
    rows = held.rows[0:n]
    wrong = (rows != zero).reshape(-1)
    if wrong.any():
        i = int(np.argmax(wrong))
        token = i // (rows.shape[1] * rows.shape[2])
        message = f"token {token} is of the exact prefix: expected a zero block, found other bits"
        yield ValueProblem("unused-bits", "rows", i, message)


def _bad_row(layer: LayerSnapshot, held: SideSnapshot, rows: NDArray[np.uint8], token: int) -> ValueProblem | None:
    """The first number that rows from `token` on may not have."""
    found = _first_bad(held, rows)
    if found is None:
        return None
    at, what = found
    n_bytes = held.rows.shape[1] * held.rows.shape[2]
    message = f"token {layer.start + token + at // n_bytes}: {what}"
    return ValueProblem("block-scale", "rows", token * n_bytes + at, message)


def _first_bad(held: SideSnapshot, rows: NDArray[np.uint8]) -> tuple[int, str] | None:
    """Offset in `rows` of the first number that a block may not have, and what it is."""
    codec = held.codec.codec
    if codec.is_float:
        kind = _FLOAT_DTYPES[codec.cache_type]
        exponent = _EXPONENTS[codec.cache_type]
        bits = np.ascontiguousarray(rows).reshape(-1).view(kind)
        bad = (bits & exponent) == exponent
        if not bad.any():
            return None
        i = int(np.argmax(bad))
        return i * kind.itemsize, f"expected finite {codec.cache_type}, found bits {int(bits[i]):#x}"
    blocks = np.ascontiguousarray(rows).reshape(-1, codec.block_bytes)
    turbo = codec.block_type.family == "turbo"
    for i in range(codec.n_scales):
        bits = np.ascontiguousarray(blocks[:, 2 * i : 2 * i + 2]).view("<u2")[:, 0]
        # a turbo norm is never negative: with its sign bit it is not below the infinite one either
        bad = bits >= 0x7C00 if turbo else (bits & 0x7C00) == 0x7C00
        if bad.any():
            block = int(np.argmax(bad))
            value = bits[block : block + 1].view("<f2")[0]
            expected = "a finite scale >= 0" if turbo else "a finite scale"
            name = codec.block_type.scale_fields[i]
            return block * codec.block_bytes + 2 * i, f"expected {expected}, found {name} {value}"
    return None
