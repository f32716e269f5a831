"""Judges the records of one GGUF file: do they make sense together, and do the tensors lie within the file?

Each rule is a generator of defects, not raised: the reader raises the first that is an error, a validator lists them
all. Values are not looked at, neither those of known metadata keys nor those of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

from tqgguf.formats.cursor import Buffer
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.parse import ARRAY_HEADER_BYTES, Entry, ParsedGguf, TensorRecord
from tqgguf.formats.gguf.types import (
    DEFAULT_ALIGNMENT,
    GGML_TYPES,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_DIMS,
    MAX_SIZE,
    REMOVED_GGML_TYPES,
    ValueType,
    ggml_type_name,
)
from tqgguf.formats.wording import shown

ALIGNMENT_KEY = "general.alignment"


def judge(parsed: ParsedGguf) -> Iterator[GgufError]:
    """All errors of one file, in its order. Ends early where later rules would have nothing to stand on."""
    yield from _keys(parsed)
    yield from _alignment(parsed)
    yield from _names(parsed)
    bad_shapes = list(_shapes(parsed))
    yield from bad_shapes
    if parsed.is_whole and not bad_alignment(parsed) and not bad_shapes:
        yield from _extents(parsed)
        yield from _overlaps(parsed)


def judge_layout(parsed: ParsedGguf) -> Iterator[GgufError]:
    """What is legal in a file that `judge` finds sound, and stands in the way of other readers."""
    yield from _texts(parsed)
    yield from _order(parsed)
    yield from _gaps(parsed)


def judge_joined(parsed: ParsedGguf, buffer: Buffer) -> Iterator[GgufError]:
    """Another GGUF behind the data of one whose tensors all lie within it."""
    if not parsed.is_whole or bad_alignment(parsed) or not all(fits(parsed, tensor) for tensor in parsed.tensors):
        return
    ends = [end for _, end, _ in _spans(parsed)]
    end = data_start(parsed) + max(ends) if ends else parsed.end
    for at in (end, padded(end, alignment(parsed))):
        if bytes(buffer[at : at + len(MAGIC)]) == MAGIC:
            message = (
                f"another GGUF begins at byte {at}, where this one should end: files were joined into one; the files "
                "of a split model stay apart in one folder, and the first is named (`tqgguf convert` merges them)"
            )
            expected = f"a file of {at} bytes"
            yield GgufError("joined-files", parsed.path, message, offset=at, expected=expected, found="another GGUF")
            return


def judge_types(parsed: ParsedGguf) -> Iterator[GgufError]:
    """Tensors whose data cannot be read. A reader lists them, and refuses them where their data is asked for."""
    for tensor in parsed.tensors:
        if tensor.type_id not in GGML_TYPES:
            yield unreadable_type(parsed.path, tensor.name, tensor.type_id, tensor.type_offset)


def unreadable_type(path: str, name: str, type_id: int, offset: int) -> GgufError:
    """The error of a tensor whose type is not known here, or no longer."""
    type_name = ggml_type_name(type_id)
    code = "removed-type" if type_id in REMOVED_GGML_TYPES else "unknown-type"
    message = f"tensor {shown(name)} cannot be read: it is of {type_name}, whose block size is unknown"
    return GgufError(code, path, message, offset=offset, tensor=name, expected="a known type", found=type_name)


def alignment(parsed: ParsedGguf) -> int:
    """Alignment of the data section and of each tensor in it, in bytes."""
    entry = find(parsed, ALIGNMENT_KEY)
    return DEFAULT_ALIGNMENT if entry is None else int(entry.value)


def data_start(parsed: ParsedGguf) -> int:
    """Offset of the data section in the file: the end of the tensor list, padded."""
    return padded(parsed.end, alignment(parsed))


def padded(n_bytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-n_bytes // unit) * unit


def n_values(tensor: TensorRecord) -> int:
    """Values of a tensor."""
    return math.prod(tensor.dims)


def n_bytes(tensor: TensorRecord) -> int | None:
    """Bytes of a tensor's data without padding; None if the type is unknown."""
    ggml_type = GGML_TYPES.get(tensor.type_id)
    return None if ggml_type is None else n_values(tensor) // ggml_type.block_size * ggml_type.block_bytes


def bad_alignment(parsed: ParsedGguf) -> bool:
    """Whether it cannot be told where the data section begins, because general.alignment cannot be used."""
    return any(_alignment(parsed))


def fits(parsed: ParsedGguf, tensor: TensorRecord) -> bool:
    """Whether a tensor's bytes are known and lie within the file, so that they can be read."""
    ggml_type = GGML_TYPES.get(tensor.type_id)
    if ggml_type is None or max(tensor.dims, default=0) > MAX_SIZE or len(tensor.dims) > MAX_DIMS:
        return False
    row = tensor.dims[0] if tensor.dims else 1
    return (
        row % ggml_type.block_size == 0
        and data_start(parsed) + tensor.data_offset + (n_bytes(tensor) or 0) <= parsed.size
    )


def is_utf8(text: str) -> bool:
    """Whether text decoded with `surrogateescape` was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def find(parsed: ParsedGguf, key: str) -> Entry | None:
    """The first entry of that key."""
    return next((entry for entry in parsed.entries if entry.key == key), None)


def _keys(parsed: ParsedGguf) -> Iterator[GgufError]:
    first: dict[str, Entry] = {}
    for i, entry in enumerate(parsed.entries):
        if not entry.key:
            yield GgufError("key-empty", parsed.path, f"metadata key {i} is empty", offset=entry.offset)
        if not is_utf8(entry.key):
            message = f"metadata key {i} is not UTF-8: {shown(entry.key)}"
            yield GgufError("key-utf8", parsed.path, message, offset=entry.offset, expected="UTF-8")
        if entry.key in first:
            before = first[entry.key].offset
            message = f"metadata key {shown(entry.key)} occurs twice, first at byte {before}"
            yield GgufError("duplicate-key", parsed.path, message, offset=entry.offset, found=shown(entry.key))
        first.setdefault(entry.key, entry)


def _alignment(parsed: ParsedGguf) -> Iterator[GgufError]:
    entry = find(parsed, ALIGNMENT_KEY)
    if entry is None:
        return
    code, expected, found = "alignment", f"a power of two up to {MAX_ALIGNMENT}", str(entry.value)
    if entry.type.value is not ValueType.U32:
        code, expected, found = "alignment-type", "U32", str(entry.type)
    elif entry.value.bit_count() == 1 and entry.value <= MAX_ALIGNMENT:
        return
    message = f"{ALIGNMENT_KEY} is {found}, expected {expected}"
    yield GgufError(code, parsed.path, message, offset=entry.value_offset, expected=expected, found=found)


def _names(parsed: ParsedGguf) -> Iterator[GgufError]:
    first: dict[str, TensorRecord] = {}
    for i, tensor in enumerate(parsed.tensors):
        at, name = tensor.offset, tensor.name
        if not name:
            yield GgufError(
                "tensor-name-empty", parsed.path, f"the name of tensor {i} is empty", offset=at, tensor=name
            )
        if not is_utf8(name):
            message = f"the name of tensor {i} is not UTF-8: {shown(name)}"
            yield GgufError("tensor-name-utf8", parsed.path, message, offset=at, tensor=name, expected="UTF-8")
        if name in first:
            message = f"tensor {shown(name)} occurs twice in the tensor list, first at byte {first[name].offset}"
            yield GgufError("duplicate-tensor", parsed.path, message, offset=at, tensor=name)
        first.setdefault(name, tensor)


def _shapes(parsed: ParsedGguf) -> Iterator[GgufError]:
    for tensor in parsed.tensors:
        name, at = tensor.name, tensor.dims_offset
        what = f"tensor {shown(name)} of shape {'x'.join(map(str, tensor.dims))}"
        below = "less than 2^63"
        for i, dim in enumerate(tensor.dims):
            if dim > MAX_SIZE:
                message = f"{what} has a dimension of {dim}, expected {below}"
                yield GgufError(
                    "dimension-size", parsed.path, message, offset=at + 8 * i, tensor=name, expected=below, found=dim
                )
        if max(tensor.dims, default=0) > MAX_SIZE:
            continue
        # a zero dimension is legal, but the others must still fit together: numpy and ggml multiply them
        values = math.prod(filter(None, tensor.dims))
        if values > MAX_SIZE:
            message = f"{what} overflows: it has {values} values, expected {below}"
            yield GgufError(
                "overflow", parsed.path, message, offset=at, tensor=name, expected=f"{below} values", found=values
            )
            continue
        ggml_type = GGML_TYPES.get(tensor.type_id)
        if ggml_type is None:
            continue
        row = tensor.dims[0] if tensor.dims else 1
        if row % ggml_type.block_size:
            expected = f"a multiple of {ggml_type.block_size}"
            message = (
                f"{what} has rows of {row} values, expected {expected}, the block size of its type {ggml_type.name}"
            )
            yield GgufError("block", parsed.path, message, offset=at, tensor=name, expected=expected, found=row)
        elif padded(values, ggml_type.block_size) // ggml_type.block_size * ggml_type.block_bytes > MAX_SIZE:
            message = f"{what} and type {ggml_type.name} overflows: it has 2^63 bytes or more"
            yield GgufError("byte-overflow", parsed.path, message, offset=at, tensor=name, expected=f"{below} bytes")


def _extents(parsed: ParsedGguf) -> Iterator[GgufError]:
    start, unit = data_start(parsed), alignment(parsed)
    due: int | None = 0  # where llama.cpp expects the next tensor; None behind one of unknown size
    missing: list[tuple[TensorRecord, int, int]] = []  # in their due place, and beyond the file's end
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
            if due in (None, offset):
                missing.append((tensor, begin, end))
            else:
                yield _beyond(parsed, tensor, "tensor-past-end", f"{what} lies at bytes {begin} to {end}", end)
        due = None if due is None or size is None else due + padded(size, unit)
    if missing:
        first, begin, end = missing[0]
        others = f", {len(missing) - 1} more behind it" if len(missing) > 1 else ""
        what = f"truncated in the tensor data: tensor {shown(first.name)} ({ggml_type_name(first.type_id)})"
        where = f"{what} lies at bytes {begin} to {end}{others}"
        yield _beyond(parsed, first, "truncated-data", where, max(end for _, _, end in missing))


def _beyond(parsed: ParsedGguf, tensor: TensorRecord, code: str, what: str, end: int) -> GgufError:
    wanted, found = f"a file of at least {end} bytes", f"{parsed.size} bytes"
    message = f"{what}, expected {wanted}, found {parsed.size}; the download is incomplete or the file is damaged"
    at = tensor.offset_offset
    return GgufError(code, parsed.path, message, offset=at, tensor=tensor.name, expected=wanted, found=found)


def _spans(parsed: ParsedGguf) -> list[tuple[int, int, TensorRecord]]:
    """Begin and end of each tensor that has bytes, in the data section, in order. One of unknown type has one byte."""
    spans = [
        (tensor.data_offset, tensor.data_offset + (1 if size is None else size), tensor)
        for tensor in parsed.tensors
        if (size := n_bytes(tensor)) != 0
    ]
    return sorted(spans, key=lambda span: span[:2])


def _overlaps(parsed: ParsedGguf) -> Iterator[GgufError]:
    start = data_start(parsed)
    for (_, end, before), (begin, _, tensor) in pairwise(_spans(parsed)):
        if begin < end:
            message = (
                f"tensors {shown(before.name)} and {shown(tensor.name)} overlap: the first ends at byte {start + end}, "
                f"the second begins at byte {start + begin}"
            )
            expected, found = f"byte {start + end} or later", f"byte {start + begin}"
            yield GgufError(
                "tensor-overlap", parsed.path, message,
                offset=tensor.offset_offset, tensor=tensor.name, expected=expected, found=found,
            )  # fmt: skip


def _texts(parsed: ParsedGguf) -> Iterator[GgufError]:
    for entry in parsed.entries:
        if entry.type.value is ValueType.STRING and not is_utf8(entry.value):
            message = f"the value of key {shown(entry.key)} is not UTF-8: {shown(entry.value)}"
            yield GgufError("text-utf8", parsed.path, message, offset=entry.value_offset, expected="UTF-8")
        elif entry.type.element is ValueType.STRING and not is_utf8("".join(entry.value)):
            i = next(i for i, text in enumerate(entry.value) if not is_utf8(text))
            message = f"string {i} of key {shown(entry.key)} is not UTF-8: {shown(entry.value[i])}"
            at = entry.value_offset + ARRAY_HEADER_BYTES
            at += sum(8 + len(text.encode("utf-8", "surrogateescape")) for text in entry.value[:i])
            yield GgufError("text-utf8", parsed.path, message, offset=at, expected="UTF-8")


def _order(parsed: ParsedGguf) -> Iterator[GgufError]:
    so_far = accumulate((tensor.data_offset for tensor in parsed.tensors), max)
    for tensor, furthest in zip(parsed.tensors[1:], so_far, strict=False):
        if tensor.data_offset < furthest:
            message = (
                f"tensor {shown(tensor.name)} has offset {tensor.data_offset}, less than that of a tensor "
                f"listed before it, {furthest}; llama.cpp does not load such a file"
            )
            expected = f"more than {furthest}"
            yield GgufError(
                "tensor-order", parsed.path, message,
                offset=tensor.offset_offset, tensor=tensor.name, expected=expected, found=tensor.data_offset,
            )  # fmt: skip


def _gaps(parsed: ParsedGguf) -> Iterator[GgufError]:
    """Bytes that belong to no tensor, as far as sizes are known."""
    start, unit = data_start(parsed), alignment(parsed)
    due = 0
    for begin, end, tensor in _spans(parsed):
        if begin > due:
            message = (
                f"tensor {shown(tensor.name)} has offset {begin}, and {begin - due} bytes before it belong to "
                "no tensor; llama.cpp does not load such a file"
            )
            yield GgufError(
                "tensor-gap", parsed.path, message,
                offset=tensor.offset_offset, tensor=tensor.name, expected=due, found=begin,
            )  # fmt: skip
        if tensor.type_id not in GGML_TYPES:
            return
        due = padded(end, unit)
    if parsed.size > start + due:
        message = f"{parsed.size - start - due} bytes follow the last tensor and its padding"
        expected, found = f"a file of {start + due} bytes", f"{parsed.size} bytes"
        yield GgufError("trailing-data", parsed.path, message, offset=start + due, expected=expected, found=found)
