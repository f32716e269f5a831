"""From bytes to records: reads a GGUF file's header, metadata and tensor list with a cursor that knows its bounds.

Everything that must hold to read on is checked here, before anything is allocated: lengths against the bytes left
and against the limits, type ids, encodings. What can be read past is reported all the same. Whether the records make
sense together (duplicates, alignment, sizes, overlaps) is judged in `rules`; the data section is not looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tqgguf.formats.cursor import U32, U64, Buffer, Cursor, Report, raise_errors
from tqgguf.formats.file_kind import HEAD_BYTES, found_instead
from tqgguf.formats.gguf.errors import GgufError
from tqgguf.formats.gguf.types import (
    MAGIC,
    MAX_ARRAY_DEPTH,
    MAX_ARRAY_ELEMENTS,
    MAX_ARRAY_STRINGS,
    MAX_DIMS,
    MAX_INNER_ARRAYS,
    MAX_KEY_BYTES,
    MAX_METADATA_ENTRIES,
    MAX_STRING_BYTES,
    MAX_TENSOR_NAME_BYTES,
    MAX_TENSORS,
    VALUE_DTYPES,
    VALUE_TYPES,
    VERSION,
    MetadataType,
    ValueType,
)
from tqgguf.formats.rules.table import DefectError
from tqgguf.formats.wording import shown


class HeaderCursor(Cursor):
    """Reads a GGUF's header; what is cut off there is a defect of the header."""

    truncated = "truncated-header"
    failure = GgufError


VERSION_DEFECTS = {
    0: ("version", "the file is damaged"),
    1: ("version-old", "rewrite it with an old llama.cpp (`quantize IN OUT COPY`) or convert the model again"),
    2: ("version-2", "it is read as version 3, which is the same but for big-endian files"),
}

MIN_ENTRY_BYTES = 8 + 4 + 1  # length of the key, type, the smallest value
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # length of the name, n_dims, type, offset
ARRAY_HEADER_BYTES = 4 + 8  # element type, count

# Beyond the limits that are an error, but small enough to believe and to read past.
MAX_SKIPPED_BYTES = 1 << 20
MAX_SKIPPED_DIMS = 64

SCALARS = {
    ValueType.U8: struct.Struct("<B"),
    ValueType.I8: struct.Struct("<b"),
    ValueType.U16: struct.Struct("<H"),
    ValueType.I16: struct.Struct("<h"),
    ValueType.U32: U32,
    ValueType.I32: struct.Struct("<i"),
    ValueType.F32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.U64: U64,
    ValueType.I64: struct.Struct("<q"),
    ValueType.F64: struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One metadata entry. Text is decoded with `surrogateescape`, so no bytes are lost where it is not UTF-8."""

    key: str
    type: MetadataType
    value: Any  # int, float, bool, str; arrays: numpy view on the file, list of str, list of arrays
    offset: int  # of the entry (its key's length) in the file
    value_offset: int  # of the value behind its type id

    def says(self, value: int | str) -> bool:
        """Whether it is exactly this value; values of other types, arrays too, are another."""
        return type(self.value) is type(value) and bool(self.value == value)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One entry of the tensor list, as it stands in the file: `dims` in ggml's order, fastest first."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    data_offset: int  # relative to the data section
    offset: int  # of the record (its name's length) in the file
    dims_offset: int  # of the first dimension

    @property
    def type_offset(self) -> int:
        return self.dims_offset + 8 * len(self.dims)

    @property
    def offset_offset(self) -> int:
        return self.type_offset + 4


@dataclass(frozen=True, slots=True)
class ParsedGguf:
    """The records of one file. `end` is the offset behind the tensor list: padding and the data section follow.

    is_whole: all records that the file promises are here, and `end` is what it says; false only where a defect was
    reported and not raised.
    """

    path: str
    size: int
    version: int
    entries: tuple[Entry, ...]
    tensors: tuple[TensorRecord, ...]
    end: int
    is_whole: bool = True


def parse(buffer: Buffer, path: str, report: Report = raise_errors) -> ParsedGguf:
    """Parses the header, the metadata and the tensor list of one GGUF file.

    `buffer` is the whole file; numeric arrays of the result are read-only views on it. `path` is for messages.
    Every defect goes to `report`: by default the first error is raised, a GgufError. Where report returns, parsing
    goes on as far as it can, and the result holds what could be read.
    """
    cursor = HeaderCursor(buffer, path, report)
    entries: list[Entry] = []
    tensors: list[TensorRecord] = []
    version = n_entries = n_tensors = 0
    is_whole = False
    try:
        _check_magic(cursor)
        version = _version(cursor)
        at_tensors = cursor.position
        n_tensors = cursor.u64("the header (tensor count)")
        at_entries = cursor.position
        n_entries = cursor.u64("the header (metadata count)")
        cursor.truncated = "truncated-metadata"
        cursor.limit(n_tensors, MAX_TENSORS, "the tensor count", at=at_tensors)
        cursor.limit(n_entries, MAX_METADATA_ENTRIES, "the metadata count", at=at_entries)
        cursor.need(n_entries * MIN_ENTRY_BYTES, f"the metadata ({n_entries} entries)", at=at_entries)
        entries.extend(_entries(cursor, n_entries))
        cursor.truncated = "truncated-tensors"
        cursor.need(n_tensors * MIN_TENSOR_BYTES, f"the tensor list ({n_tensors} tensors)")
        tensors.extend(_tensor(cursor, i) for i in range(n_tensors))
        is_whole = True
    except DefectError as error:
        report(error)
    return ParsedGguf(path, cursor.size, version, tuple(entries), tuple(tensors), cursor.position, is_whole)


def _check_magic(cursor: Cursor) -> None:
    head = cursor.buffer[:HEAD_BYTES]
    if head[:4] == MAGIC:
        cursor.position = 4
        return
    if head and MAGIC.startswith(head):
        cursor.need(4, "the magic")
    code, found = found_instead(head)
    expected = f"a file that begins with {MAGIC.decode()}" if code == "not-gguf" else "a GGUF file"
    raise cursor.error(code, f"expected {expected}, found {found}", expected=expected, found=found)


def _version(cursor: Cursor) -> int:
    """The version. 2 is read as 3, of which it lacks nothing but big-endian files."""
    at = cursor.position
    version = cursor.u32("the header (version)")
    if version == VERSION:
        return version
    if version & 0xFFFF == 0 and version:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        found = f"big-endian (version {swapped})"
        message = f"expected little-endian byte order, found {found}; convert it with `gguf-convert-endian FILE little`"
        raise cursor.error("big-endian", message, at, expected="little-endian", found=found)
    code, advice = VERSION_DEFECTS.get(version, ("version-new", "it was written by newer software than this"))
    message = f"expected GGUF version {VERSION}, found version {version}; {advice}"
    error = cursor.error(code, message, at, expected=VERSION, found=version)
    if error.is_error:
        raise error
    cursor.report(error)
    return version


def _entries(cursor: Cursor, n_entries: int) -> Iterator[Entry]:
    inner_arrays = InnerArrays()
    for i in range(n_entries):
        offset = cursor.position
        key = cursor.text(f"metadata key {i}", MAX_KEY_BYTES, "key-length", MAX_SKIPPED_BYTES)
        what = f"the metadata (key {shown(key)})"
        value_type = _value_type(cursor, cursor.u32(what), what)
        value_offset = cursor.position
        if value_type is ValueType.ARRAY:
            element, value = _array(cursor, what, inner_arrays)
            yield Entry(key, MetadataType(value_type, element), value, offset, value_offset)
        else:
            yield Entry(key, MetadataType(value_type), _scalar(cursor, value_type, what), offset, value_offset)


def _value_type(cursor: Cursor, type_id: int, what: str) -> ValueType:
    """The type whose id has just been read."""
    if type_id not in VALUE_TYPES:
        raise cursor.error("value-type", f"{what} has value type {type_id}, expected 0 to 12", cursor.position - 4)
    return VALUE_TYPES[type_id]


def _scalar(cursor: Cursor, value_type: ValueType, what: str) -> int | float | bool | str:
    if value_type is ValueType.STRING:
        return cursor.text(f"the value of {what}", MAX_STRING_BYTES)
    packed = SCALARS[value_type]
    cursor.need(packed.size, what)
    (value,) = packed.unpack_from(cursor.buffer, cursor.position)
    if value_type is ValueType.BOOL:
        if value > 1:
            message = f"{what} is a boolean, expected 0 or 1, found {value}"
            cursor.report(cursor.error("bool", message, expected="0 or 1", found=value))
        value = bool(value)
    cursor.position += packed.size
    return value


class InnerArrays:
    """Counts the arrays within arrays of one file."""

    def __init__(self) -> None:
        self.count = 0


def _array(cursor: Cursor, what: str, inner_arrays: InnerArrays) -> tuple[ValueType, Any]:
    """Element type and value of an array. Nested arrays are walked with a stack of our own, never by recursion."""
    element, count = _array_header(cursor, what)
    if element is not ValueType.ARRAY:
        return element, _flat_array(cursor, element, count, what)
    value: list[Any] = []
    open_arrays = [(value, count)]
    while open_arrays:
        target, missing = open_arrays.pop()
        if not missing:
            continue
        open_arrays.append((target, missing - 1))
        at = cursor.position
        inner_arrays.count += 1
        cursor.limit(inner_arrays.count, MAX_INNER_ARRAYS, f"the number of nested arrays up to {what}", at=at)
        inner, count = _array_header(cursor, what)
        if inner is not ValueType.ARRAY:
            target.append(_flat_array(cursor, inner, count, what))
        elif len(open_arrays) + 1 >= MAX_ARRAY_DEPTH:
            raise cursor.error("array-depth", f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep", at)
        else:
            nested: list[Any] = []
            target.append(nested)
            open_arrays.append((nested, count))
    return element, value


def _array_header(cursor: Cursor, what: str) -> tuple[ValueType, int]:
    """Element type and count of the array at the cursor, with the count checked against the bytes left."""
    element = _value_type(cursor, cursor.u32(what), what)
    at = cursor.position
    count = cursor.u64(what)
    cursor.limit(count, MAX_ARRAY_ELEMENTS, f"the array length of {what}", at=at)
    if element is ValueType.STRING:
        cursor.limit(count, MAX_ARRAY_STRINGS, f"the array length of {what}", at=at)
        smallest = 8
    elif element is ValueType.ARRAY:
        smallest = ARRAY_HEADER_BYTES
    else:
        smallest = VALUE_DTYPES[element].itemsize
    cursor.need(count * smallest, f"{what}, an array of {count} {element.name}", at=at)
    return element, count


def _flat_array(cursor: Cursor, element: ValueType, count: int, what: str) -> np.ndarray | list[str]:
    if element is ValueType.STRING:
        return _strings(cursor, count, what)
    dtype = VALUE_DTYPES[element]
    if not count:
        return np.empty(0, np.bool_ if element is ValueType.BOOL else dtype)
    values = np.frombuffer(cursor.buffer, dtype, count, cursor.position)
    if element is ValueType.BOOL:
        if values.max() > 1:
            i = int(np.argmax(values > 1))
            message = f"{what} is an array of booleans, expected 0 or 1, found {values[i]} in element {i}"
            cursor.report(cursor.error("bool", message, cursor.position + i, expected="0 or 1", found=values[i]))
            cursor.position += values.nbytes
            return values > 0
        values = values.view(np.bool_)
    cursor.position += values.nbytes
    return values


def _strings(cursor: Cursor, count: int, what: str) -> list[str]:
    """`count` strings. The loop is the hot spot of opening a model (262,144 tokens and as many merges), hence bare."""
    buffer, last_length = cursor.buffer, cursor.size - 8
    length_at = U64.unpack_from
    position = cursor.position
    strings: list[str] = []
    append = strings.append
    for i in range(count):
        if position > last_length:
            cursor.position = position
            cursor.need(8, f"{what}, the length of string {i} of {count}")
        start = position + 8
        position = start + length_at(buffer, position)[0]
        if position > cursor.size:
            cursor.position = start
            cursor.need(position - start, f"{what}, string {i} of {count}", at=start - 8)
        append(buffer[start:position].decode("utf-8", "surrogateescape"))
    cursor.position = position
    return strings


def _tensor(cursor: Cursor, i: int) -> TensorRecord:
    offset = cursor.position
    name = cursor.text(f"the tensor list (name {i})", MAX_TENSOR_NAME_BYTES, "tensor-name-length", MAX_SKIPPED_BYTES)
    what = f"the tensor list (tensor {shown(name)})"
    at = cursor.position
    n_dims = cursor.u32(what)
    if n_dims > MAX_DIMS:
        message = f"tensor {shown(name)} has {n_dims} dimensions, expected at most {MAX_DIMS}"
        error = cursor.error("dimensions", message, at, expected=f"at most {MAX_DIMS}", found=n_dims)
        if n_dims > MAX_SKIPPED_DIMS:
            raise error
        cursor.report(error)
    dims_offset = cursor.position
    cursor.need(8 * n_dims + 4 + 8, what)
    dims = tuple(cursor.u64(what) for _ in range(n_dims))
    type_id = cursor.u32(what)
    data_offset = cursor.u64(what)
    return TensorRecord(name, dims, type_id, data_offset, offset, dims_offset)
