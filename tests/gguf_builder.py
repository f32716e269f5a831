"""Builds GGUF files in memory for the tests, sound ones and ones with any defect, by plain struct packing.

Independent of tqgguf and of gguf-py's writer, so that the reader is held against something else than itself.

    data = build_gguf(
        {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "b"]},
        {"token_embd.weight": np.zeros((2, 32), np.float32), "output.weight": quantised(weights, "Q4_1")},
    )

Metadata values: bool -> BOOL, int -> U32 (I32 if negative, U64 or I64 if larger), float -> F32, str or bytes -> STRING,
numpy scalars and arrays -> the type of their dtype, lists -> ARRAY (of int: I32; of float: F32; of str or bytes:
STRING; of bool: BOOL; of lists: nested). `Typed(U64, 5)` or `Typed(U8, [1, 2])` names the (element) type,
`Payload(type_id, data)` writes any bytes. Tensors: numpy arrays (float32 float16 float64 int8 int16 int32 int64), or
`Tensor(shape, type_id, data)` with the shape in numpy's order, slowest first. They are laid out in order, padded to
the alignment; `general.alignment` in the metadata is obeyed.

Defects: duplicate keys or names by passing lists of pairs instead of dicts; keys and names that are not UTF-8 as bytes;
wrong tensor fields by `Tensor(..., dims=, n_dims=, offset=)`; wrong header fields by build_gguf's keyword arguments;
truncation and flipped bytes by slicing the result, whose parts `sections` locates.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

PACKING = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
VALUE_TYPE_OF_DTYPE = {
    "uint8": U8, "int8": I8, "uint16": U16, "int16": I16, "uint32": U32, "int32": I32, "float32": F32, "bool": BOOL,
    "uint64": U64, "int64": I64, "float64": F64,
}  # fmt: skip
GGML_TYPE_OF_DTYPE = {"float32": 0, "float16": 1, "int8": 24, "int16": 25, "int32": 26, "int64": 27, "float64": 28}


@dataclass(frozen=True)
class Typed:
    """A metadata value with its GGUF type named: a scalar, or a list whose elements are of that type."""

    type_id: int
    value: Any


@dataclass(frozen=True)
class Payload:
    """A metadata value as bytes behind any type id, sound or not."""

    type_id: int
    data: bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry and data; `dims` (ggml's order), `n_dims` and `offset` replace what would be right."""

    shape: tuple[int, ...]
    type_id: int
    data: bytes
    dims: tuple[int, ...] | None = None
    n_dims: int | None = None
    offset: int | None = None


Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]]


def build_gguf(metadata: Pairs | None = None, tensors: Pairs | None = None, **defects: Any) -> bytes:
    """The bytes of one GGUF file. `defects` are the keyword arguments of `sections`."""
    return b"".join(sections(metadata, tensors, **defects).values())


def sections(
    metadata: Pairs | None = None,
    tensors: Pairs | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_entries: int | None = None,
    order: str = "<",
    pad_end: bool = True,
) -> dict[str, bytes]:
    """The file as its parts: "header", "metadata", "tensor list", "padding", "data".

    `order` is "<" or ">" (big-endian); counts other than None are written as they are, whatever follows; `pad_end` says
    whether the last tensor is padded like the others.
    """
    entries = _pairs(metadata)
    alignment = next((_plain(value) for key, value in entries if key == "general.alignment"), 32)
    if not isinstance(alignment, int) or not 0 < alignment < 1 << 24:
        alignment = 32
    named = [(name, tensor_of(tensor)) for name, tensor in _pairs(tensors)]
    records, data = [], b""
    for name, tensor in named:
        dims = tensor.shape[::-1] if tensor.dims is None else tensor.dims
        n_dims = len(dims) if tensor.n_dims is None else tensor.n_dims
        offset = len(data) if tensor.offset is None else tensor.offset
        records.append(
            _string(name, order)
            + struct.pack(f"{order}I{len(dims)}QIQ", n_dims, *dims, tensor.type_id, offset)
        )  # fmt: skip
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    if not pad_end and named:
        data = data[: len(data) - (-len(named[-1][1].data) % alignment)]
    counts = (
        len(named) if n_tensors is None else n_tensors,
        len(entries) if n_entries is None else n_entries,
    )
    header = magic + struct.pack(f"{order}IQQ", version, *counts)
    packed = b"".join(_string(key, order) + pack_value(value, order) for key, value in entries)
    tensor_list = b"".join(records)
    end = len(header) + len(packed) + len(tensor_list)
    return {
        "header": header,
        "metadata": packed,
        "tensor list": tensor_list,
        "padding": bytes(-end % alignment) if named else b"",
        "data": data,
    }


def write_split(folder: Path, name: str, metadata: Mapping[str, Any], shards: list[Mapping[str, Any]]) -> list[Path]:
    """Writes a sound split set, a shard per mapping of tensors, the model's metadata in the first; returns paths."""
    total = sum(len(tensors) for tensors in shards)
    paths = []
    for i, tensors in enumerate(shards):
        own = {
            "split.no": Typed(U16, i),
            "split.count": Typed(U16, len(shards)),
            "split.tensors.count": Typed(I32, total),
        }
        path = folder / f"{name}-{i + 1:05d}-of-{len(shards):05d}.gguf"
        path.write_bytes(build_gguf({**metadata, **own} if i == 0 else own, tensors))
        paths.append(path)
    return paths


def tensor_of(values: Tensor | np.ndarray, **overrides: Any) -> Tensor:
    """A numpy array as a Tensor of its dtype's type; a Tensor as it is. `overrides` replace fields."""
    if not isinstance(values, Tensor):
        little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        values = Tensor(values.shape, GGML_TYPE_OF_DTYPE[values.dtype.name], little.tobytes())
    return replace(values, **overrides)


def quantised(values: np.ndarray, type_name: str) -> Tensor:
    """Float values [..., n] as a tensor of a block type that gguf-py can quantise: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 BF16 ..."""
    import gguf

    type_id = gguf.GGMLQuantizationType[type_name]
    return Tensor(values.shape, int(type_id), gguf.quantize(values.astype(np.float32), type_id).tobytes())


def pack_value(value: Any, order: str = "<") -> bytes:
    """Type id and value of one metadata entry."""
    if isinstance(value, Payload):
        return struct.pack(f"{order}I", value.type_id) + value.data
    type_id = _type_of(value)
    body = _array(value, order) if type_id == ARRAY else _scalar(type_id, _plain(value), order)
    return struct.pack(f"{order}I", type_id) + body


def _array(value: Any, order: str) -> bytes:
    """Element type, count and elements."""
    elements = list(value.value) if isinstance(value, Typed) else list(value)
    if isinstance(value, Typed):
        element = value.type_id
    elif isinstance(value, np.ndarray):
        element = VALUE_TYPE_OF_DTYPE[value.dtype.name]
    elif not elements:
        element = I32
    else:
        element = _type_of(elements[0])
        if element in (U32, U64, I64):
            element = I32
    header = struct.pack(f"{order}IQ", element, len(elements))
    if element == ARRAY:
        return header + b"".join(_array(inner, order) for inner in elements)
    if element == STRING:
        return header + b"".join(_string(text, order) for text in elements)
    return header + struct.pack(f"{order}{len(elements)}{PACKING[element]}", *elements)


def _scalar(type_id: int, value: Any, order: str) -> bytes:
    return _string(value, order) if type_id == STRING else struct.pack(order + PACKING[type_id], value)


def _string(text: str | bytes, order: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack(f"{order}Q", len(data)) + data


def _type_of(value: Any) -> int:
    if isinstance(value, Typed):
        return ARRAY if isinstance(value.value, list | tuple | np.ndarray) else value.type_id
    if isinstance(value, list | tuple | np.ndarray):
        return ARRAY
    if isinstance(value, np.generic):
        return VALUE_TYPE_OF_DTYPE[value.dtype.name]
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        if value < 0:
            return I32 if value >= -(1 << 31) else I64
        return U32 if value < 1 << 32 else U64
    if isinstance(value, float):
        return F32
    if isinstance(value, str | bytes):
        return STRING
    raise TypeError(f"no GGUF type for {value!r}")


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Typed) else value


def _pairs(mapping: Any) -> list[tuple[Any, Any]]:
    return list(mapping.items()) if isinstance(mapping, Mapping) else list(mapping or ())
