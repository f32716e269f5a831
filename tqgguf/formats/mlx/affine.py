"""MLX's affine quantisation, as its QuantizedKVCache stores keys and values: codes, and a scale and bias per group.

value = scale * code + bias. Codes of `bits` bits lie one after the other in 32-bit words, the lowest bits first.
Arithmetic as mlx.core.quantize has it: in float32, with scale and bias rounded to the type of the values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
_EPS = np.float32(1e-7)


def unpack_codes(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Words uint32 [..., n] to codes uint8 [..., n * 32 / bits]."""
    raw = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if bits == 8:
        return raw
    single = np.unpackbits(raw, axis=-1, bitorder="little")
    single = single.reshape(*words.shape[:-1], -1, bits)
    return np.packbits(single, axis=-1, bitorder="little")[..., 0]


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """The way back."""
    single = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(single.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return packed.view("<u4")


def dequantise(
    words: NDArray[np.uint32], scales: NDArray[np.float32], biases: NDArray[np.float32], bits: int
) -> NDArray[np.float32]:
    """Words uint32 [..., n], scales and biases float32 [..., groups] to values float32 [..., n * 32 / bits]."""
    codes = unpack_codes(words, bits)
    grouped = codes.reshape(*scales.shape, -1).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite are refused where they are encoded
        grouped *= scales[..., None]
        grouped += biases[..., None]
    return grouped.reshape(codes.shape)


def quantise(
    values: NDArray[np.float32], bits: int, group_size: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]:
    """Values float32 [..., n] to words uint32 [..., n * bits / 32], and scales and biases float32 [..., groups]."""
    groups = values.reshape(*values.shape[:-1], -1, group_size)
    n_bins = np.float32((1 << bits) - 1)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    down = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / n_bins, _EPS)
    scale = np.where(down, scale, -scale)
    edge = np.where(down, low, high)
    steps = np.rint(edge / scale)
    coded = steps != 0
    scale = np.divide(edge, steps, out=scale, where=coded)
    bias = np.where(coded, edge, np.float32(0))
    codes = np.rint((groups - bias[..., None]) / scale[..., None])
    codes = np.clip(codes, np.float32(0), n_bins).astype(np.uint8)
    return pack_codes(codes.reshape(values.shape), bits), scale, bias
