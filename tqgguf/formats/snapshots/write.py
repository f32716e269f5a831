"""Writes a snapshot as our GGUF carrier, in one pass and in slices: no second copy of the cache is made.

The header is gguf's own writer's, the data section ours, so that checksums are taken as bytes go by. The same snapshot
makes the same bytes: there is no date and no machine in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.atomic import replacing
from tqgguf.formats.blocks.codec import Side
from tqgguf.formats.blocks.kv_size import SIDES
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import RequestError
from tqgguf.formats.gguf.types import DEFAULT_ALIGNMENT
from tqgguf.formats.snapshots.checksums import Checksummer, n_entries
from tqgguf.formats.snapshots.format import (
    CHECKSUM,
    CHECKSUM_ALGORITHM,
    CHECKSUMS,
    CHUNK_BYTES,
    CODEC_VERSION,
    CODECS,
    F32,
    GENERAL_TYPE,
    I8,
    I32,
    KEYS,
    LAYERS,
    ORIGIN,
    TOKENS,
    VERSION,
    codec_tensor,
    side_tensor,
)
from tqgguf.formats.snapshots.snapshot import LayerSnapshot, Snapshot
from tqgguf.formats.snapshots.values import check_parts, checked_slices, not_written

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True)
class _Part:
    """One tensor to be written: shape in numpy's order, bytes in pieces when its turn comes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_bytes: int
    pieces: Callable[[], Iterable[NDArray[Any]]]


def write_snapshot(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Write a snapshot into a file for its owner alone, or replace one; errors as `atomic.replacing`.

    FormatError: parts of the snapshot do not fit together, or hold numbers that no file may hold (`values`). What
    `path` held stays as it was until all is written.
    """
    with not_written(path):
        snapshot.check()
        check_parts(snapshot)
        _write_checked(path, snapshot)


def _write_checked(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    import gguf  # lazily: reading needs no writer

    codecs = codecs_of(snapshot)
    parts = [part for part in _parts(snapshot, codecs) if part.n_bytes]
    n_bytes = sum(_padded(part.n_bytes) for part in parts)
    with replacing(path, private=True) as temporary:
        writer = gguf.GGUFWriter(temporary, snapshot.architecture)
        try:
            _add_metadata(writer, snapshot, codecs)
            for part in parts:
                _add_tensor(writer, part.name, part.shape, part.ggml_type, part.n_bytes)
            _add_tensor(writer, CHECKSUMS, (n_entries(n_bytes),), I32, 4 * n_entries(n_bytes))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        _append_data(temporary, parts)


def codecs_of(snapshot: Snapshot) -> tuple[StoredCodec, ...]:
    """The codecs of a snapshot, each once, in the order of their first use."""
    return tuple(dict.fromkeys(layer.side(side).codec for layer in snapshot.layers for side in SIDES))


def _parts(snapshot: Snapshot, codecs: tuple[StoredCodec, ...]) -> Iterator[_Part]:
    yield _array_part(TOKENS, I32, snapshot.tokens)
    for i, codec in enumerate(codecs):
        for name, (ggml_type, table) in codec_tables(codec).items():
            yield _array_part(codec_tensor(i, name), ggml_type, table)
    for layer in snapshot.layers:
        for side in SIDES:
            for part, array in layer.side(side).parts():
                yield _array_part(side_tensor(layer.layer, side, part.name), part.ggml_type, array)
            yield _rows_part(side_tensor(layer.layer, side, "rows"), layer, side)


def codec_tables(codec: StoredCodec) -> Mapping[str, tuple[int, NDArray[Any]]]:
    """The tables that stand in a file for a codec, by name, with their tensor type; none where its type says it all."""
    made = codec.codec
    if made.block_type.family != "turbo":
        return {}
    assert made.rotation is not None and made.codebook is not None and made.boundaries is not None
    signs = np.stack(made.rotation.signs or ()).astype(np.int8)
    return {"codebook": (F32, made.codebook), "boundaries": (F32, made.boundaries), "signs": (I8, signs)}


def _array_part(name: str, ggml_type: int, array: NDArray[Any]) -> _Part:
    return _Part(name, array.shape, ggml_type, array.nbytes, lambda: [np.ascontiguousarray(array)])


def _rows_part(name: str, layer: LayerSnapshot, side: Side) -> _Part:
    """Types that ggml knows are tensors of that type, turbo types bytes. What no file may hold shows while they are
    written."""
    held = layer.side(side)
    n_tokens, n_kv_heads, row_bytes = held.rows.shape
    ggml_type = held.codec.codec.block_type.ggml_type
    last = row_bytes if ggml_type is None else held.codec.stored_dim
    shape = (n_tokens, n_kv_heads, last)
    return _Part(
        name,
        shape,
        I8 if ggml_type is None else ggml_type,
        n_tokens * n_kv_heads * row_bytes,
        partial(checked_slices, layer, side),
    )


def _add_tensor(writer: GGUFWriter, name: str, shape: tuple[int, ...], ggml_type: int, n_bytes: int) -> None:
    import gguf

    # any dtype but uint8, for which the writer would take the shape to be in bytes
    writer.add_tensor_info(name, shape, np.dtype(np.int8), n_bytes, gguf.GGMLQuantizationType(ggml_type))


def _add_metadata(writer: GGUFWriter, snapshot: Snapshot, codecs: tuple[StoredCodec, ...]) -> None:
    from gguf import GGUFValueType as T

    writer.add_type(GENERAL_TYPE)
    if snapshot.model:
        writer.add_name(snapshot.model)
    writer.add_uint32(f"{KEYS}version", VERSION)
    writer.add_uint64(f"{KEYS}cells", snapshot.n_cells)
    writer.add_uint32(f"{KEYS}chunk", snapshot.chunk)
    writer.add_uint32(f"{KEYS}vocabulary", snapshot.n_vocab)
    ranges = [edge for pair in snapshot.prompt_ranges for edge in pair]
    if ranges:
        writer.add_key_value(f"{KEYS}prompt_ranges", ranges, T.ARRAY, T.UINT64)
    writer.add_uint32(f"{KEYS}layers", len(snapshot.layers))
    index = {codec: i for i, codec in enumerate(codecs)}
    layers = snapshot.layers
    columns: tuple[tuple[str, list[Any], T], ...] = (
        (f"{CODECS}version", [CODEC_VERSION for _ in codecs], T.UINT32),
        (f"{CODECS}type", [codec.cache_type for codec in codecs], T.STRING),
        (f"{CODECS}head_dim", [codec.head_dim for codec in codecs], T.UINT32),
        (f"{CODECS}stored_dim", [codec.stored_dim for codec in codecs], T.UINT32),
        (f"{CODECS}block_size", [codec.codec.block_size for codec in codecs], T.UINT32),
        (f"{CODECS}block_bytes", [codec.codec.block_bytes for codec in codecs], T.UINT32),
        (f"{CODECS}rotation", [codec.rotation for codec in codecs], T.STRING),
        (f"{CODECS}rotation_size", [codec.rotation_size for codec in codecs], T.UINT32),
        (f"{CODECS}generation", [codec.generation for codec in codecs], T.UINT32),
        (f"{LAYERS}number", [layer.layer for layer in layers], T.UINT32),
        (f"{LAYERS}kv_heads", [layer.n_kv_heads for layer in layers], T.UINT32),
        (f"{LAYERS}start", [layer.start for layer in layers], T.UINT64),
        (f"{LAYERS}window", [layer.window or 0 for layer in layers], T.UINT64),
        (f"{LAYERS}codec_k", [index[layer.k.codec] for layer in layers], T.UINT32),
        (f"{LAYERS}codec_v", [index[layer.v.codec] for layer in layers], T.UINT32),
        (f"{LAYERS}balance", [layer.balance for layer in layers], T.STRING),
        (f"{LAYERS}prefix", [layer.n_prefix for layer in layers], T.UINT32),
        (f"{LAYERS}rope_dims", [layer.rope.dims for layer in layers], T.UINT32),
        (f"{LAYERS}rope_traditional", [layer.rope.traditional for layer in layers], T.BOOL),
        (f"{LAYERS}scale_is_given", [layer.scale_is_given for layer in layers], T.BOOL),
    )
    for key, values, element in columns:
        if values:
            writer.add_key_value(key, values, T.ARRAY, element)
    for key, value in () if snapshot.fingerprint is None else snapshot.fingerprint.entries().items():
        writer.add_key_value(key, value, T.STRING if isinstance(value, str) else T.UINT32)
    for name, value in snapshot.origin.items():
        _add_origin(writer, name, value)
    writer.add_string(f"{CHECKSUM}algorithm", CHECKSUM_ALGORITHM)
    writer.add_uint32(f"{CHECKSUM}chunk", CHUNK_BYTES)


def _add_origin(writer: GGUFWriter, name: str, value: Any) -> None:
    from gguf import GGUFValueType as T

    scalars = {bool: T.BOOL, str: T.STRING, int: T.INT64}
    if type(value) in scalars:
        writer.add_key_value(ORIGIN + name, value, scalars[type(value)])
        return
    elements = {"u1": T.UINT8, "u4": T.UINT32, "i4": T.INT32, "u8": T.UINT64, "i8": T.INT64}
    element = elements.get(value.dtype.str[1:]) if isinstance(value, np.ndarray) and value.ndim == 1 else None
    if element is None:
        raise RequestError(f"origin {name}: expected a string, a whole number or an array of them, found {value!r:.80}")
    if len(value):  # gguf's writer has no empty arrays: absent means empty
        writer.add_key_value(ORIGIN + name, value.tolist(), T.ARRAY, element)


def _append_data(path: Path, parts: list[_Part]) -> None:
    """Pad the header, then write all tensors, padded, and the checksums."""
    with path.open("r+b") as file:
        header = file.read()
        header += bytes(_padded(len(header)) - len(header))
        file.seek(0)
        file.write(header)
        sums = Checksummer(header)
        for part in parts:
            _write(file, sums, part)
        entries = sums.entries().tobytes()
        file.write(entries + bytes(_padded(len(entries)) - len(entries)))


def _write(file: BinaryIO, sums: Checksummer, part: _Part) -> None:
    written = 0
    for piece in part.pieces():
        data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        sums.update(data.data)
        file.write(data.data)
        written += data.nbytes
    assert written == part.n_bytes, f"{part.name}: {written} bytes instead of {part.n_bytes}"
    padding = bytes(_padded(written) - written)
    sums.update(padding)
    file.write(padding)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
