"""Headers of safetensors files, checked; tensors as views of the mapped file.

A file is a little-endian u64 n, n bytes of JSON {name: {"dtype", "shape", "data_offsets": [start, end]}} (offsets in
bytes from the end of the JSON), and the data. Dtypes are taken as the names that they are: what values mean is not
known here.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tqgguf.formats.errors import FormatError, TqggufError
from tqgguf.formats.gguf_errors import shown

MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
_METADATA = "__metadata__"


@dataclass(frozen=True)
class SafeTensor:
    """One tensor: `data` are its bytes, a view of the file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def open_safetensors(path: str | os.PathLike[str]) -> Mapping[str, SafeTensor]:
    """The tensors of a file by name. The mapping of the file stays until the last view of it is gone.

    FormatError: the header breaks the format, or data lies outside the file. TqggufError: it cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except (OSError, ValueError) as error:
        raise TqggufError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    length = int.from_bytes(view[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise FormatError(f"{path}: expected a safetensors header, found {size} bytes that begin otherwise", offset=0)
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: expected a header in JSON, found a mistake: {error}", offset=8) from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: expected an object as header, found {type(header).__name__}", offset=8)
    data = view[8 + length :]
    return {name: _tensor(path, name, entry, data) for name, entry in header.items() if name != _METADATA}


def _tensor(path: str | os.PathLike[str], name: str, entry: Any, data: memoryview) -> SafeTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise FormatError(f"{path}: tensor {shown(name)}: expected dtype, shape and data_offsets, found {shown(entry)}")
    start, end = offsets
    if not start <= end <= len(data):
        raise FormatError(
            f"{path}: tensor {shown(name)}: expected data within {len(data)} bytes, found it at {start} to {end}"
        )
    return SafeTensor(dtype, shape, data[start:end])


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of numbers >= 0, or None for anything else."""
    return tuple(value) if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value) else None
