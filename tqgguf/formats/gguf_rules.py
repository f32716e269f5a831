"""Judges the records of one GGUF file: do they make sense together, and do the tensors lie within the file?

Each rule is a generator of errors, not raised: the reader raises the first, a validator may list them all. Values are
not looked at, neither those of known metadata keys nor those of tensors. Gaps between tensors and any order of them are
legal here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from tqgguf.formats.gguf_errors import GgufError, shown
from tqgguf.formats.gguf_parse import Entry, ParsedGguf, TensorRecord
from tqgguf.formats.gguf_types import (
    DEFAULT_ALIGNMENT,
    GGML_TYPES,
    MAX_ALIGNMENT,
    MAX_SIZE,
    ValueType,
    ggml_type_name,
)

ALIGNMENT_KEY = "general.alignment"


def judge(parsed: ParsedGguf) -> Iterator[GgufError]:
    """All errors of one file, in the order of the file. Ends early where later rules would have nothing to stand on."""
    yield from _keys(parsed)
    bad_alignment = list(_alignment(parsed))
    yield from bad_alignment
    yield from _names(parsed)
    bad_shapes = list(_shapes(parsed))
    yield from bad_shapes
    if not bad_alignment and not bad_shapes:
        yield from _extents(parsed)
        yield from _overlaps(parsed)


def alignment(parsed: ParsedGguf) -> int:
    """Alignment of the data section and of each tensor in it, in bytes."""
    entry = _find(parsed, ALIGNMENT_KEY)
    return DEFAULT_ALIGNMENT if entry is None else int(entry.value)


def data_start(parsed: ParsedGguf) -> int:
    """Offset of the data section in the file: the end of the tensor list, padded."""
    unit = alignment(parsed)
    return -(-parsed.end // unit) * unit


def n_values(tensor: TensorRecord) -> int:
    return math.prod(tensor.dims)


def n_bytes(tensor: TensorRecord) -> int | None:
    """Bytes of a tensor's data without padding; None if the type is unknown."""
    ggml_type = GGML_TYPES.get(tensor.type_id)
    return None if ggml_type is None else n_values(tensor) // ggml_type.block_size * ggml_type.block_bytes


def is_utf8(text: str) -> bool:
    """Whether text decoded with `surrogateescape` was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find(parsed: ParsedGguf, key: str) -> Entry | None:
    return next((entry for entry in parsed.entries if entry.key == key), None)


def _keys(parsed: ParsedGguf) -> Iterator[GgufError]:
    first: dict[str, Entry] = {}
    for i, entry in enumerate(parsed.entries):
        if not entry.key:
            yield GgufError("key-empty", parsed.path, f"metadata key {i} is empty", offset=entry.offset)
        if not is_utf8(entry.key):
            yield GgufError(
                "key-utf8", parsed.path, f"metadata key {i} is not UTF-8: {shown(entry.key)}", offset=entry.offset
            )
        if entry.key in first:
            before = first[entry.key].offset
            message = f"metadata key {shown(entry.key)} occurs twice, first at byte {before}"
            yield GgufError("duplicate-key", parsed.path, message, offset=entry.offset)
        first.setdefault(entry.key, entry)


def _alignment(parsed: ParsedGguf) -> Iterator[GgufError]:
    entry = _find(parsed, ALIGNMENT_KEY)
    if entry is None:
        return
    if entry.type.value is not ValueType.U32:
        message = f"{ALIGNMENT_KEY} is {entry.type}, expected U32"
        yield GgufError("alignment-type", parsed.path, message, offset=entry.value_offset)
    elif entry.value.bit_count() != 1 or entry.value > MAX_ALIGNMENT:
        message = f"{ALIGNMENT_KEY} is {entry.value}, expected a power of two up to {MAX_ALIGNMENT}"
        yield GgufError("alignment", parsed.path, message, offset=entry.value_offset)


def _names(parsed: ParsedGguf) -> Iterator[GgufError]:
    first: dict[str, TensorRecord] = {}
    for i, tensor in enumerate(parsed.tensors):
        if not tensor.name:
            yield GgufError("tensor-name-empty", parsed.path, f"the name of tensor {i} is empty", offset=tensor.offset)
        if not is_utf8(tensor.name):
            message = f"the name of tensor {i} is not UTF-8: {shown(tensor.name)}"
            yield GgufError("tensor-name-utf8", parsed.path, message, offset=tensor.offset)
        if tensor.name in first:
            before = first[tensor.name].offset
            message = f"tensor {shown(tensor.name)} occurs twice in the tensor list, first at byte {before}"
            yield GgufError("duplicate-tensor", parsed.path, message, offset=tensor.offset)
        first.setdefault(tensor.name, tensor)


def _shapes(parsed: ParsedGguf) -> Iterator[GgufError]:
    for tensor in parsed.tensors:
        what = f"tensor {shown(tensor.name)} of shape {'x'.join(map(str, tensor.dims))}"
        for i, dim in enumerate(tensor.dims):
            if dim > MAX_SIZE:
                message = f"{what} has a dimension of {dim}, expected less than 2^63"
                yield GgufError("dimension-size", parsed.path, message, offset=tensor.dims_offset + 8 * i)
        # a zero dimension is legal, but the others must still fit together: numpy and ggml multiply them
        values = math.prod(filter(None, tensor.dims))
        if values > MAX_SIZE:
            message = f"{what} overflows: it has {values} values, expected less than 2^63"
            yield GgufError("overflow", parsed.path, message, offset=tensor.dims_offset)
            continue
        ggml_type = GGML_TYPES.get(tensor.type_id)
        if ggml_type is None:
            continue
        row = tensor.dims[0] if tensor.dims else 1
        if row % ggml_type.block_size:
            message = (
                f"{what} has rows of {row} values, expected a multiple of {ggml_type.block_size}, "
                f"the block size of its type {ggml_type.name}"
            )
            yield GgufError("block", parsed.path, message, offset=tensor.dims_offset)
        elif -(-values // ggml_type.block_size) * ggml_type.block_bytes > MAX_SIZE:
            message = f"{what} and type {ggml_type.name} overflows: it has 2^63 bytes or more"
            yield GgufError("byte-overflow", parsed.path, message, offset=tensor.dims_offset)


def _extents(parsed: ParsedGguf) -> Iterator[GgufError]:
    start, unit = data_start(parsed), alignment(parsed)
    due: int | None = 0  # where llama.cpp expects the next tensor; None behind one of unknown size
    for tensor in parsed.tensors:
        offset, at, name = tensor.data_offset, tensor.offset_offset, tensor.name
        what = f"tensor {shown(name)} ({ggml_type_name(tensor.type_id)})"
        if offset % unit:
            wanted = f"a multiple of the alignment {unit}"
            message = f"{what} has offset {offset}, expected {wanted}"
            yield GgufError(
                "offset-unaligned", parsed.path, message, offset=at, tensor=name, expected=wanted, found=offset
            )
        # an unknown type's size is unknown too: all that can be said is where its data would begin
        size = n_bytes(tensor)
        begin = start + offset
        end = begin + (size or 0)
        if end > MAX_SIZE:
            message = f"{what} has offset {offset}: its end does not fit in 63 bits"
            yield GgufError("offset-overflow", parsed.path, message, offset=at, tensor=name, found=offset)
        # without any data, even the padding before the data section may be left out
        elif end > (parsed.size if size != 0 else max(parsed.size, start)):
            is_due = due in (None, offset)
            message = (
                f"{'truncated in the tensor data: ' if is_due else ''}{what} lies at bytes {begin} to {end}, expected "
                f"a file of at least {end} bytes, found {parsed.size}; the download is incomplete or the file is "
                "damaged"
            )
            code = "truncated-data" if is_due else "tensor-past-end"
            wanted = f"a file of at least {end} bytes"
            yield GgufError(
                code, parsed.path, message, offset=at, tensor=name, expected=wanted, found=f"{parsed.size} bytes"
            )
        due = None if due is None or size is None else due + -(-size // unit) * unit


def _overlaps(parsed: ParsedGguf) -> Iterator[GgufError]:
    """Neighbours in the order of their offsets must not overlap. A tensor of unknown type counts as one byte."""
    spans = []
    for tensor in parsed.tensors:
        size = n_bytes(tensor)
        if size != 0:
            spans.append((tensor.data_offset, tensor.data_offset + (size or 1), tensor))
    spans.sort(key=lambda span: span[:2])
    start = data_start(parsed)
    for (_, end, before), (begin, _, tensor) in pairwise(spans):
        if begin < end:
            message = (
                f"tensors {shown(before.name)} and {shown(tensor.name)} overlap: the first ends at byte {start + end}, "
                f"the second begins at byte {start + begin}"
            )
            at = tensor.offset_offset
            yield GgufError("tensor-overlap", parsed.path, message, offset=at, tensor=tensor.name)
