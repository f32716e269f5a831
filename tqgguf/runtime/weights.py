"""A GGUF tensor's bytes as mlx arrays: dense float32 for CPUs, packed and exact for GPUs where mlx has a form that fits.

mlx's affine form holds value = scale * code + bias per group of 32; every ggml type of groups of 32 with a linear code fits
it exactly with float32 scales. Knows tensors, not models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as T
from numpy.typing import NDArray

from tqgguf.formats.errors import UnsupportedModelError
from tqgguf.formats.gguf_reader import GGUFFile

AFFINE_GROUP = 32  # values that share a scale and a bias in every packed form here


@dataclass(frozen=True)
class Packed:
    """A matrix in mlx's affine form: weight uint32 [rows, columns * bits / 32], scales and biases f32 [rows, columns / 32]."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def dense(file: GGUFFile, name: str) -> NDArray[np.float32]:
    """A tensor as float32 in numpy's shape (slowest dimension first). UnsupportedModelError for types nobody can decode."""
    info = file.tensors[name]
    if info.ggml_type == T.F32:
        return file.array(name)
    try:
        return gguf.quants.dequantize(file.array(name), T(info.ggml_type)).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(f"tensor {name}: type {info.type_name} cannot be decoded: {error}") from None


def packed(file: GGUFFile, name: str) -> Packed | None:
    """A matrix in mlx's affine form, or None where its type has no exact one (Q6_K, Q3_K, Q2_K, float types ...)."""
    info = file.tensors[name]
    unpack = _UNPACK.get(info.ggml_type)
    if unpack is None or len(info.shape) != 2:
        return None
    size, n_bytes = gguf.GGML_QUANT_SIZES[T(info.ggml_type)]
    blocks = file.array(name).reshape(info.shape[0], info.shape[1] // size, n_bytes)
    bits, codes, scales, biases = unpack(blocks)
    rows = info.shape[0]
    return Packed(
        mx.array(_pack_bits(codes.reshape(rows, -1), bits)),
        mx.array(scales.reshape(rows, -1).astype(np.float32)),
        mx.array(biases.reshape(rows, -1).astype(np.float32)),
        bits,
    )


def _pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes [rows, columns] as one little-endian bit stream a row."""
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(codes[:, ::2] | (codes[:, 1::2] << 4)).view(np.uint32)
    spread = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(spread.reshape(len(codes), -1), axis=1, bitorder="little").view(np.uint32)


Unpacked = tuple[int, NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]
"""bits, codes [rows, blocks, values], scales and biases [rows, blocks, groups of 32]."""


def _f16(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(qs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _fifth_bit(qh: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.unpackbits(qh, axis=-1, bitorder="little") << 4


def _q4_0(b: NDArray[np.uint8]) -> Unpacked:
    d = _f16(b, 0)
    return 4, _nibbles(b[..., 2:]), d, -8 * d


def _q4_1(b: NDArray[np.uint8]) -> Unpacked:
    return 4, _nibbles(b[..., 4:]), _f16(b, 0), _f16(b, 2)


def _q5_0(b: NDArray[np.uint8]) -> Unpacked:
    d = _f16(b, 0)
    return 5, _nibbles(b[..., 6:]) | _fifth_bit(b[..., 2:6]), d, -16 * d


def _q5_1(b: NDArray[np.uint8]) -> Unpacked:
    return 5, _nibbles(b[..., 8:]) | _fifth_bit(b[..., 4:8]), _f16(b, 0), _f16(b, 2)


def _q8_0(b: NDArray[np.uint8]) -> Unpacked:
    d = _f16(b, 0)
    return 8, b[..., 2:] ^ 0x80, d, -128 * d  # a signed byte plus 128


def _iq4_nl(b: NDArray[np.uint8]) -> Unpacked:
    table = (np.array(gguf.quants.IQ4_NL.kvalues, np.int16) + 128).astype(np.uint8)
    d = _f16(b, 0)
    return 8, table[_nibbles(b[..., 2:])], d, -128 * d


def _k_scales(b: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and biases of the eight groups of a Q4_K or Q5_K block: d * scale and -dmin * minimum."""
    scale, minimum = gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(b[..., 4:16]).reshape(-1, 12))
    lead = b.shape[:-1]
    return _f16(b, 0) * scale.reshape(*lead, 8), -_f16(b, 2) * minimum.reshape(*lead, 8)


def _k_nibbles(qs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """128 bytes: four runs of 32, each first its low nibbles, then its high ones."""
    runs = qs.reshape(*qs.shape[:-1], 4, 32)
    return np.stack([runs & 15, runs >> 4], axis=-2)


def _q4_k(b: NDArray[np.uint8]) -> Unpacked:
    scales, biases = _k_scales(b)
    return 4, _k_nibbles(b[..., 16:]).reshape(*b.shape[:-1], 256), scales, biases


def _q5_k(b: NDArray[np.uint8]) -> Unpacked:
    scales, biases = _k_scales(b)
    high = (b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    low = _k_nibbles(b[..., 48:]).reshape(*b.shape[:-1], 8, 32)
    return 5, (low | (high << 4)).reshape(*b.shape[:-1], 256), scales, biases


_UNPACK: dict[int, Callable[[NDArray[np.uint8]], Unpacked]] = {
    T.Q4_0: _q4_0,
    T.Q4_1: _q4_1,
    T.Q5_0: _q5_0,
    T.Q5_1: _q5_1,
    T.Q8_0: _q8_0,
    T.IQ4_NL: _iq4_nl,
    T.Q4_K: _q4_k,
    T.Q5_K: _q5_k,
}
