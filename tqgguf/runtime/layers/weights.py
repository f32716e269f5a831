"""A GGUF tensor's bytes as arrays: dense float32, or packed as in the file where mlx has a form that is exact.

mlx's affine form holds value = scale * code + bias per group of 32; every ggml type of groups of 32 with a linear code
fits it exactly with float32 scales, and a code of 8 bits holds iq4's table. Its mxfp4 and nvfp4 forms are ggml's types
of those names. Decoding goes by row groups, so that a tensor is never there more than twice. Knows tensors, not models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gguf
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.errors import FormatError, UnsupportedModelError
from tqgguf.formats.gguf import tensor_values
from tqgguf.formats.gguf.reader import GGUFFile, TensorInfo
from tqgguf.formats.gguf.tensor_values import can_decode, decode, undecodable
from tqgguf.formats.gguf.types import GGML_TYPES
from tqgguf.formats.mlx.forms import MLX_FORMS

VALUES_AT_ONCE = 1 << 22  # decoded per step: 16 MB of float32

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Packed:
    """A matrix in one of mlx's packed forms, `mode` affine, mxfp4 or nvfp4.

    weight: uint32 [rows, columns * bits / 32]. scales: [rows, columns / group_size], float32 for affine, else uint8.
    biases: float32 like scales for affine, else None.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str


def dense(file: GGUFFile, name: str) -> NDArray[np.float32]:
    """A tensor as float32 in numpy's shape (slowest dimension first).

    UnsupportedModelError for types that cannot be decoded, FormatError where a value is not finite.
    """
    info = file.tensor(name)
    if not can_decode(info.ggml_type):
        raise undecodable(file, info)
    if info.type_name == "F32":
        values = file.array(name)
        _check_finite(file, info, values)
        return values
    values = np.empty(info.shape, np.float32)
    for rows, decoded in _decoded(file, info):
        values.reshape(-1, info.shape[-1])[rows] = decoded
    return values


def half(file: GGUFFile, name: str, dtype: mx.Dtype) -> mx.array:
    """A matrix as float16, or as bfloat16 if it is of that type, without a float32 copy of the whole.

    Errors as `dense`; UnsupportedModelError also for values beyond float16.
    """
    info = file.tensor(name)
    if not can_decode(info.ggml_type):
        raise undecodable(file, info)
    values = np.empty(info.shape, np.float16 if dtype == mx.float16 else np.uint16)
    for rows, decoded in _decoded(file, info):
        if dtype == mx.float16:
            with np.errstate(over="ignore"):
                values[rows] = decoded
            if np.isinf(values[rows]).any():
                raise UnsupportedModelError(
                    f"{file.path}: tensor {name}: {np.abs(decoded).max():g} is beyond float16, in which a GPU holds it"
                )
        else:
            values[rows] = decoded.view(np.uint32) >> np.uint32(16)
    return mx.array(values) if dtype == mx.float16 else mx.array(values).view(mx.bfloat16)


def check_values(file: GGUFFile, name: str) -> None:
    """FormatError where a value of a tensor is not finite; decodes it in passing."""
    for _ in _decoded(file, file.tensor(name)):
        pass


def _decoded(file: GGUFFile, info: TensorInfo) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Groups of rows of a tensor, seen as a matrix, with their finite values float32 [rows, columns]."""
    stored = file.array(info.name)
    stored = stored.reshape(-1, stored.shape[-1])
    for rows in row_groups((len(stored), info.shape[-1])):
        with np.errstate(all="ignore"):  # whatever overflows here is found below
            values = decode(info, stored[rows])
        _check_finite(file, info, values)
        yield rows, values


def packed(file: GGUFFile, name: str) -> Packed | None:
    """A matrix in one of mlx's packed forms, or None where its type or its values have no exact one (float types, Q6_K,
    Q3_K, Q2_K ...). FormatError where a scale is not finite.
    """
    info = file.tensor(name)
    form = MLX_FORMS.get(info.type_name)
    if form is None or len(info.shape) != 2 or not info.n_values:
        return None
    n_rows, n_columns = info.shape
    ggml = GGML_TYPES[info.ggml_type]
    blocks = file.array(name).reshape(n_rows, n_columns // ggml.block_size, ggml.block_bytes)
    unpack = _UNPACK[info.type_name]
    is_affine = form.mode == "affine"
    weight = np.empty((n_rows, n_columns * form.bits // 32), np.uint32)
    scales = np.empty((n_rows, n_columns // form.group_size), np.float32 if is_affine else np.uint8)
    biases = np.empty_like(scales) if is_affine else None
    for rows in row_groups(info.shape):
        codes, some_scales, some_biases = unpack(blocks[rows])
        if form.largest_scale is not None and some_scales.max() > form.largest_scale:
            return None
        weight[rows] = _pack_bits(codes.reshape(len(codes), -1), form.bits)
        scales[rows] = some_scales.reshape(len(codes), -1)
        if biases is not None:
            biases[rows] = some_biases.reshape(len(codes), -1)
    if biases is not None:
        _check_finite(file, info, scales)
        _check_finite(file, info, biases)
    return Packed(
        mx.array(weight),
        mx.array(scales),
        None if biases is None else mx.array(biases),
        form.bits,
        form.group_size,
        form.mode,
    )


def _check_finite(file: GGUFFile, info: TensorInfo, values: NDArray[np.float32]) -> None:
    flat = values.reshape(-1)
    with np.errstate(all="ignore"):
        if np.isfinite(np.dot(flat, flat)):  # one pass without a temporary; it can only err towards looking closer
            return
    bad = np.flatnonzero(~np.isfinite(flat))
    if len(bad):
        raise FormatError(
            f"{file.path}: tensor {info.name}: expected finite values, found {flat[bad[0]]}; the file is damaged",
            offset=info.offset,
        )


def row_groups(shape: tuple[int, ...], n_values: int | None = None) -> Iterator[slice]:
    """Runs of rows of at most n_values values (VALUES_AT_ONCE if none are given), of one row at least."""
    return tensor_values.row_groups(shape, n_values or VALUES_AT_ONCE)


def _pack_bits(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """Codes [rows, columns] as one little-endian bit stream a row."""
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(codes[:, ::2] | (codes[:, 1::2] << 4)).view(np.uint32)
    spread = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(spread.reshape(len(codes), -1), axis=1, bitorder="little").view(np.uint32)


Unpacked = tuple[Bytes, NDArray, NDArray]
"""Of blocks [rows, blocks, bytes]: codes [rows, blocks, ...], scales and biases [rows, blocks, groups]."""


def _f16(blocks: Bytes, at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(qs: Bytes) -> Bytes:
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _fifth_bit(qh: Bytes) -> Bytes:
    return np.unpackbits(qh, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> Unpacked:
    d = _f16(b, 0)
    return _nibbles(b[..., 2:]), d, -8 * d


def _q4_1(b: Bytes) -> Unpacked:
    return _nibbles(b[..., 4:]), _f16(b, 0), _f16(b, 2)


def _q5_0(b: Bytes) -> Unpacked:
    d = _f16(b, 0)
    return _nibbles(b[..., 6:]) | _fifth_bit(b[..., 2:6]), d, -16 * d


def _q5_1(b: Bytes) -> Unpacked:
    return _nibbles(b[..., 8:]) | _fifth_bit(b[..., 4:8]), _f16(b, 0), _f16(b, 2)


def _q8_0(b: Bytes) -> Unpacked:
    d = _f16(b, 0)
    return b[..., 2:] ^ np.uint8(0x80), d, -128 * d  # a signed byte plus 128


_IQ4_CODES = (np.array(gguf.quants.IQ4_NL.kvalues, np.int16) + 128).astype(np.uint8)


def _iq4_nl(b: Bytes) -> Unpacked:
    d = _f16(b, 0)
    return _IQ4_CODES[_nibbles(b[..., 2:])], d, -128 * d


def _iq4_xs(b: Bytes) -> Unpacked:
    """Eight groups of 32; each scale is 4 low bits (bytes 4-7) and 2 high bits (bytes 2-3), less 32, times d."""
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*b.shape[:-1], 8)
    high = (np.ascontiguousarray(b[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = _f16(b, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    groups = b[..., 8:].reshape(*b.shape[:-1], 8, 16)
    return _IQ4_CODES[_nibbles(groups)], scales, -128 * scales


def _k_scales(b: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and biases of the eight groups of a Q4_K or Q5_K block: d * scale and -dmin * minimum."""
    scale, minimum = gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(b[..., 4:16]).reshape(-1, 12))
    lead = b.shape[:-1]
    return _f16(b, 0) * scale.reshape(*lead, 8), -_f16(b, 2) * minimum.reshape(*lead, 8)


def _k_nibbles(qs: Bytes) -> Bytes:
    """128 bytes: four runs of 32, each first its low nibbles, then its high ones."""
    runs = qs.reshape(*qs.shape[:-1], 4, 32)
    return np.stack([runs & 15, runs >> 4], axis=-2)


def _q4_k(b: Bytes) -> Unpacked:
    return _k_nibbles(b[..., 16:]), *_k_scales(b)


def _q5_k(b: Bytes) -> Unpacked:
    high = (b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    low = _k_nibbles(b[..., 48:]).reshape(*b.shape[:-1], 8, 32)
    return low | (high << np.uint8(4)), *_k_scales(b)


def _mxfp4(b: Bytes) -> Unpacked:
    return _nibbles(b[..., 1:]), b[..., :1], b[..., :0]


def _nvfp4(b: Bytes) -> Unpacked:
    """Four groups of 16 a block."""
    return _nibbles(b[..., 4:].reshape(*b.shape[:-1], 4, 8)), b[..., :4], b[..., :0]


_UNPACK: dict[str, Callable[[Bytes], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
"""One for each of MLX_FORMS."""


def folder_bytes(info: TensorInfo) -> int:
    """About how many bytes a tensor takes in mlx's form, or as floats where it has none."""
    form = MLX_FORMS.get(info.type_name)
    if form is None:
        return info.n_values * (4 if info.type_name == "F32" else 2)
    return form.n_bytes(info.n_values)
