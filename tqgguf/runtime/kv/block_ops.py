"""Blocks in pure MLX operations: decoding on any device, and encoding a page of turbo blocks on a GPU.

These are the plain twins of the kernels: every unpacker is its formula. Byte-exact encoding is numpy's
(`encode_page_numpy`); `encode_page_mlx` may differ from it by one ulp of a norm, and by a code where a value lies on a
boundary. Knows nothing of caches, pages' positions or attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.codebooks import codebook
from tqgguf.formats.blocks.codec import Codec, refuse_non_finite
from tqgguf.formats.blocks.rotation import Rotation
from tqgguf.runtime.thread_cache import lru_cache_in_thread

F16_MAX = 65504.0  # largest finite float16
_LARGEST = {mx.float16: F16_MAX, mx.bfloat16: 2.0**127 * (2 - 2.0**-7)}
TINY_NORM = 1e-10  # at or below it a vector is taken for zero: the turbo blocks' encoding rule


def as_float(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """x in a float type: finite values beyond its range become its largest, others that are not finite stay."""
    if x.dtype in (dtype, mx.float16) or dtype not in _LARGEST:
        return x.astype(dtype)
    wide = x.astype(mx.float32)  # bfloat16 has no 65504: it would be rounded up, beyond float16's range
    return mx.where(mx.isinf(wide), wide, mx.clip(wide, -_LARGEST[dtype], _LARGEST[dtype])).astype(dtype)


def to_f16(x: mx.array) -> mx.array:
    """float16 of x, as `as_float` has it."""
    if x.dtype == mx.float16:
        return x
    return _as_f16(x) if mx.default_device() == mx.cpu else _compiled_as_f16()(x)


def _as_f16(x: mx.array) -> mx.array:
    return as_float(x, mx.float16)


@lru_cache_in_thread(1)
def _compiled_as_f16() -> Any:
    """One kernel instead of several."""
    return mx.compile(_as_f16, shapeless=True)


def to_f16_numpy(x: mx.array) -> NDArray[np.float16]:
    """`to_f16` of float32, at once."""
    values = np.asarray(x)
    with np.errstate(over="ignore"):
        rows = values.astype(np.float16)
    if not np.isfinite(rows).all():
        finite = np.isfinite(values)
        rows[finite] = np.clip(values[finite], -F16_MAX, F16_MAX)
    return rows


def check_finite_numpy(rows: mx.array) -> None:
    """EncodeError at the first value that is not finite (evaluates `rows`)."""
    values = np.asarray(rows)
    refuse_non_finite(values, values)


def can_encode(codec: Codec) -> bool:
    """Whether `encode_page_mlx` works in MLX operations, and so does not look for values that are not finite."""
    return codec.cache_type in _PACK


def join_rows(tail: mx.array | None, new: mx.array) -> mx.array:
    """`Backend.join_side`, lazily."""
    new = to_f16(new).squeeze(0)
    return new if tail is None else mx.concatenate([tail, new], axis=1)


# Unpacking: code bytes [..., code_bytes] of a block -> integers [..., block_size].


def _nibble_pairs(b: mx.array) -> mx.array:
    return _flat(mx.stack([b & 15, b >> 4], axis=-1))


def _nibble_halves(b: mx.array) -> mx.array:
    return mx.concatenate([b & 15, b >> 4], axis=-1)


def _bit_fields(b: mx.array, bits: int) -> mx.array:
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    return _flat((b[..., None] >> shifts) & ((1 << bits) - 1))


def _flat(x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _two_and_one(b: mx.array) -> mx.array:
    n_low = b.shape[-1] * 2 // 3
    return _bit_fields(b[..., :n_low], 2) | (_bit_fields(b[..., n_low:], 1) << 2)


def _one_and_nibbles(b: mx.array) -> mx.array:
    return (_bit_fields(b[..., :4], 1) << 4) | _nibble_halves(b[..., 4:])


_UNPACK: dict[str, Callable[[mx.array], mx.array]] = {
    "turbo4": _nibble_pairs,
    "turbo3": _two_and_one,
    "turbo2": lambda b: _bit_fields(b, 2),
    "q8_0": lambda b: b.view(mx.int8),
    "q5_1": _one_and_nibbles,
    "q5_0": _one_and_nibbles,
    "q4_1": _nibble_halves,
    "q4_0": _nibble_halves,
    "iq4_nl": _nibble_halves,
}
_ZERO_CODE = {"q5_0": 16, "q4_0": 8}  # ggml's symmetric types store code + this


@lru_cache(maxsize=64)
def _constants(codec: Codec) -> mx.array | None:
    return None if codec.codebook is None else mx.array(codec.codebook)


def decode_rotated(codec: Codec, codes: mx.array, scales: mx.array) -> mx.array:
    """Planes to f32 [..., head_dim], still rotated.

    codes: uint8 [..., n_blocks * code_bytes]; scales: f16 [..., n_blocks * n_scales].
    """
    lead = codes.shape[:-1]
    integers = _UNPACK[codec.cache_type](codes.reshape(*lead, codec.n_blocks, codec.code_bytes))
    factors = scales.reshape(*lead, codec.n_blocks, codec.n_scales).astype(mx.float32)
    book = _constants(codec)
    if book is not None:
        values = mx.take(book, integers)
    else:
        values = integers.astype(mx.float32) - _ZERO_CODE.get(codec.cache_type, 0)
    values = values * factors[..., :1]
    if codec.n_scales == 2:
        values = values + factors[..., 1:]
    return values.reshape(*lead, codec.head_dim)


def decode_pages(codec: Codec, codes: mx.array, scales: mx.array) -> mx.array:
    """Planes [pages, n_kv_heads, tokens, ...] -> f32 rows [n_kv_heads, pages * tokens, head_dim] in original axes."""
    rows = unrotate(codec.rotation, decode_rotated(codec, codes, scales)).swapaxes(0, 1)
    return rows.reshape(rows.shape[0], -1, codec.head_dim)


def rotate(rotation: Rotation | None, x: mx.array) -> mx.array:
    """f32 [..., head_dim] into the rotated domain."""
    return _apply(rotation, x, None if rotation is None else rotation.signs)


def unrotate(rotation: Rotation | None, x: mx.array) -> mx.array:
    """f32 [..., head_dim] out of the rotated domain."""
    return _apply(rotation, x, None if rotation is None or rotation.signs is None else rotation.signs[::-1])


def _apply(rotation: Rotation | None, x: mx.array, signs: Any) -> mx.array:
    if rotation is None:
        return x
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // rotation.size, rotation.size)
    if signs is not None:
        parts = parts * mx.array(signs[0])
    parts = mx.hadamard_transform(parts)
    if signs is not None:
        parts = parts * mx.array(signs[1])
    return parts.reshape(x.shape)


# Packing: integers [..., block_size] -> code bytes [..., code_bytes].


def _join_bits(x: mx.array, bits: int) -> mx.array:
    per_byte = 8 // bits
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // per_byte, per_byte) << shifts
    return groups.sum(axis=-1).astype(mx.uint8)


_PACK: dict[str, Callable[[mx.array], mx.array]] = {
    "turbo4": lambda x: _join_bits(x, 4),
    "turbo3": lambda x: mx.concatenate([_join_bits(x & 3, 2), _join_bits(x >> 2, 1)], axis=-1),
    "turbo2": lambda x: _join_bits(x, 2),
}


def encode_page_mlx(codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
    """A page of turbo blocks in MLX operations (for GPUs), where what is not finite counts as 0; other types go through
    numpy."""
    if not can_encode(codec):
        return encode_page_numpy(codec, rows)
    book = codebook(codec.block_type.bits, codec.block_size)
    lead = rows.shape[:-1]
    x = rows.astype(mx.float32).reshape(*lead, codec.n_blocks, codec.block_size)
    x = mx.where(mx.isfinite(x), x, 0.0)
    norm = mx.sqrt((x * x).sum(axis=-1, keepdims=True))
    x = rotate(codec.rotation, x * mx.where(norm > TINY_NORM, 1 / mx.maximum(norm, TINY_NORM), 0.0))
    index = (x[..., None] >= mx.array(book.boundaries)).sum(axis=-1).astype(mx.uint8)
    chosen = mx.take(mx.array(book.values), index)
    length = mx.sqrt((chosen * chosen).sum(axis=-1, keepdims=True))
    norm = mx.where(length > TINY_NORM, norm / mx.maximum(length, TINY_NORM), norm)
    codes = _PACK[codec.cache_type](index).reshape(*lead, codec.n_blocks * codec.code_bytes)
    return codes, mx.minimum(norm, F16_MAX).astype(mx.float16).reshape(*lead, codec.n_blocks)


def encode_page_numpy(codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
    """A page of any block type with the exact bytes of the format (evaluates `rows`)."""
    codes, scales = codec.split(codec.encode(np.asarray(rows)))
    return mx.array(codes), mx.array(scales)
