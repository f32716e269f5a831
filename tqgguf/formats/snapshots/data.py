"""Looks at the bytes of a snapshot in our GGUF carrier: checksums, scales of blocks, bits that nobody reads, values.

Structure is `snapshots.read`'s, which comes first. Data is streamed in slices of rows, each looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import SCALE_LIMITS
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.errors import FormatError
from tqgguf.formats.gguf.errors import GgufError, shown
from tqgguf.formats.gguf.finite import no_progress
from tqgguf.formats.gguf.reader import GGUFFile
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.snapshots.checksums import damaged, n_entries
from tqgguf.formats.snapshots.format import (
    CHECKSUM,
    CHECKSUM_ALGORITHM,
    CHECKSUMS,
    CHUNK_BYTES,
    I32,
    TOKENS,
    side_tensor,
)
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, SideSnapshot, Snapshot, bad_token

_FLOAT_DTYPES: dict[str, Any] = {"f32": np.dtype("<u4"), "f16": np.dtype("<u2"), "bf16": np.dtype("<u2")}
_EXPONENTS = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}


def data_defects(
    file: GGUFFile, snapshot: Snapshot | None, progress: Callable[[int], None] = no_progress
) -> Iterator[DefectError]:
    """What is wrong with the data, in the order of the file; without a snapshot, whose structure was not sound, only
    what checksums say. progress: called with bytes whose checksums were looked at, and with 0 on the way through rows.
    """
    yield from checksum_defects(file, progress)
    if snapshot is None:
        return
    yield from _token_defects(file, snapshot)
    for layer in snapshot.layers:
        for side in SIDES:
            yield from _part_defects(file, layer, side)
            yield from _tail_defects(file, layer, side)
            yield from _row_defects(file, layer, side, progress)


def checksum_defects(file: GGUFFile, progress: Callable[[int], None] = no_progress) -> Iterator[DefectError]:
    """Holds every byte before the checksums against them."""
    path = file.path
    kind = file.metadata.get(f"{CHECKSUM}algorithm"), file.metadata.get(f"{CHECKSUM}chunk")
    if not (file.says(f"{CHECKSUM}algorithm", CHECKSUM_ALGORITHM) and file.says(f"{CHECKSUM}chunk", CHUNK_BYTES)):
        expected = f"{CHECKSUM_ALGORITHM} of every {CHUNK_BYTES} bytes"
        message = f"checksums: expected {expected}, found {shown(kind[0])} of every {shown(kind[1])}"
        yield GgufError("checksum-kind", path, message, expected=expected, found=shown(kind))
        return
    info = file.tensors.get(CHECKSUMS)
    if info is None:
        yield GgufError("checksum-missing", path, f"tensor {CHECKSUMS!r} is missing", tensor=CHECKSUMS)
        return
    start = file.data_start
    n_bytes = info.offset - start
    expected_shape = (n_entries(n_bytes),)
    last = max(other.offset for other in file.tensors.values())
    if info.ggml_type != I32 or info.shape != expected_shape or info.offset != last:
        message = (
            f"tensor {CHECKSUMS!r}: expected {expected_shape[0]} numbers I32 for the {n_bytes} bytes before it, behind "
            f"all other tensors, found {info.type_name} {list(info.shape)}"
        )
        yield GgufError("checksum-missing", path, message, offset=info.offset, tensor=CHECKSUMS)
        return
    entries, content = file.array(CHECKSUMS).view(np.uint32), file.bytes_of(0)
    behind = bytes(content[info.offset + entries.nbytes :])
    if any(behind) or len(behind) >= file.alignment:
        message = f"expected zero bytes up to a multiple of {file.alignment} behind the checksums, found others"
        yield GgufError("checksum", path, message, offset=info.offset + entries.nbytes, tensor=CHECKSUMS)
    for first, end in damaged(content, start, n_bytes, entries, progress):
        if first < 0:
            first, end, names = info.offset, info.offset + 4 * len(entries), CHECKSUMS
        else:
            touched = (
                t for t in file.tensors.values() if t.n_bytes and first < t.offset + t.n_bytes and t.offset < end
            )
            names = ", ".join(t.name for t in sorted(touched, key=lambda t: t.offset)) or "the header"
        shown_names = names if len(names) <= 80 else f"{names[:80]}..."
        message = f"bytes {first} to {end} differ from their checksum; they belong to {shown_names}"
        yield GgufError("checksum", path, message, offset=first, tensor=names.split(", ")[0])


def _token_defects(file: GGUFFile, snapshot: Snapshot) -> Iterator[DefectError]:
    bad = bad_token(snapshot.tokens, snapshot.n_vocab)
    if bad is not None:
        at, found = file.tensors[TOKENS].offset + 4 * bad.place, int(snapshot.tokens[bad.place])
        yield GgufError(
            "token-range", file.path, bad.message, offset=at, tensor=TOKENS, expected=bad.expected, found=found
        )


def _part_defects(file: GGUFFile, layer: LayerSnapshot, side: Side) -> Iterator[DefectError]:
    """f16 and f32 parts must be finite, scales and squares within their limits."""
    held = layer.side(side)
    low, high = SCALE_LIMITS
    for part in ("tail", "prefix", "page_means", "channel_scale", "query_squares"):
        array = getattr(held, part)
        if array is None or not array.size:
            continue
        sound, expected = np.isfinite(array), "a finite number"
        if part == "channel_scale":
            sound, expected = (array >= low) & (array <= high), f"a number from {low:g} to {high:g}"
        elif part == "query_squares":
            # a query beyond float32's squares says nothing, and is kept as it is
            sound, expected = array >= 0, "a number >= 0"
        if not sound.all():
            i = int(np.argmin(sound))
            found = array.reshape(-1)[i]
            yield _defect(
                file,
                "part-value",
                layer,
                side,
                part,
                i * array.itemsize,
                f"value {i}: expected {expected}, found {found}",
            )


def _tail_defects(file: GGUFFile, layer: LayerSnapshot, side: Side) -> Iterator[DefectError]:
    """While page 0 is the tail, it holds the exact prefix too: the same values."""
    held = layer.side(side)
    if held.prefix is None or held.tail is None or layer.start or held.rows.shape[0]:
        return
    n = min(len(held.prefix), len(held.tail))
    differs = (held.prefix[:n].view(np.uint16) != held.tail[:n].view(np.uint16)).reshape(-1)
    if differs.any():
        i = int(np.argmax(differs))
        message = f"value {i}: expected that of the tail, whose first tokens these are, found another"
        yield _defect(file, "part-value", layer, side, "prefix", 2 * i, message)


def _row_defects(
    file: GGUFFile, layer: LayerSnapshot, side: Side, progress: Callable[[int], None]
) -> Iterator[DefectError]:
    held = layer.side(side)
    yield from _prefix_defects(file, layer, side, held)
    n_bytes = held.rows.shape[1] * held.rows.shape[2]
    token = 0
    for rows in held.slices():
        problem = _first_bad(held, rows)
        if problem is not None:
            at, what = problem
            where = token + at // n_bytes
            message = f"token {layer.start + where}: {what}"
            yield _defect(file, "block-scale", layer, side, "rows", token * n_bytes + at, message)
            return  # one for each tensor: a damaged one may have millions
        token += len(rows)
        progress(0)
    try:
        held.open_page(layer.start)
    except FormatError as error:
        page = max(0, token - (layer.start + token) % PAGE_TOKENS)
        yield _defect(file, "part-value", layer, side, "rows", page * n_bytes, str(error))


def _prefix_defects(file: GGUFFile, layer: LayerSnapshot, side: Side, held: SideSnapshot) -> Iterator[DefectError]:
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
        yield _defect(file, "unused-bits", layer, side, "rows", i, message)


def _defect(
    file: GGUFFile, rule: str, layer: LayerSnapshot, side: Side, part: str, at: int, message: str
) -> DefectError:
    name = side_tensor(layer.layer, side, part)
    offset = file.tensors[name].offset + at
    return GgufError(rule, file.path, f"tensor {name!r}: {message}", offset=offset, tensor=name)


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
