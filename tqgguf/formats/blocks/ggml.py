"""Kernels of the float types and of ggml's quantised types, with the bytes of ggml's reference quantizers.

Two rules go beyond ggml. Where ggml would store a scale or a float that is not finite, the nearest finite one is
stored, so that no block decodes to infinity. Where ggml's codes are undefined behaviour or stale memory (scales so
small that 1 / d is infinite, iq4_nl blocks below 1e-15) they are the codes of zero. Rotation is left to `codec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import BlockType
from tqgguf.formats.blocks.codebooks import Codebook
from tqgguf.formats.blocks.turbo import F16_MAX, count_not_above, ordered_sum

QK = 32  # values in a block of every quantised type here
_STEP = 1 << 11  # blocks per step: buffers stay in a core's L2 cache

# ggml's 16 values of iq4_nl. Its nearest-value search takes the upper of two equally near ones, like our boundaries.
_IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
IQ4_NL_CODEBOOK = Codebook(_IQ4_NL_VALUES, (_IQ4_NL_VALUES[1:] + _IQ4_NL_VALUES[:-1]) / np.float32(2))
_IQ4_NL_EPS = np.float32(1e-15)
_F32_MAX = np.finfo(np.float32).max
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))

_Columns = NDArray[np.float32]
_Coded = tuple[list[NDArray[np.float32]], NDArray[np.uint8]]


def inverse(d: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / d; 0 where d is zero or so small that 1 / d is infinite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def first_extreme(x: _Columns) -> NDArray[np.float32]:
    """Of each column the first value of largest magnitude; +0 for a column of zeros."""
    top, bottom = x.max(axis=0), x.min(axis=0)
    extreme = np.where(top >= -bottom, top, bottom)
    tied = np.flatnonzero((top == -bottom) & (top > 0))
    if tied.size:
        first = np.argmax(np.abs(x[:, tied]), axis=0)
        extreme[tied] = x[first, tied]
    return extreme + np.float32(0)  # -0 + 0 = +0


def _first_lowest(x: _Columns) -> NDArray[np.float32]:
    """The minimum of each column; of +0 and -0 the one that comes first."""
    low = x.min(axis=0)
    zero = np.flatnonzero(low == 0)
    if zero.size:
        low[zero] = x[np.argmax(x[:, zero] == 0, axis=0), zero]
    return low


def _encode_q8_0(x: _Columns) -> _Coded:
    d = np.maximum(x.max(axis=0), -x.min(axis=0)) / np.float32(127) + np.float32(0)
    q = x * inverse(d)
    # round half away from zero: adding the float just below 0.5 and truncating never rounds 0.49999997 up
    q += np.copysign(_BELOW_HALF, q)
    return [d], q.astype(np.int8).view(np.uint8)


def _encode_symmetric(half_range: int) -> Callable[[_Columns], _Coded]:
    def encode(x: _Columns) -> _Coded:
        d = first_extreme(x) / np.float32(-half_range)
        q = x * inverse(d)
        q += np.float32(half_range + 0.5)
        return [d], np.minimum(q.astype(np.uint8), np.uint8(2 * half_range - 1))

    return encode


def _encode_affine(levels: int) -> Callable[[_Columns], _Coded]:
    def encode(x: _Columns) -> _Coded:
        low = _first_lowest(x)
        d = (np.minimum(x.max(axis=0) - low, _F32_MAX) + np.float32(0)) / np.float32(levels)
        q = x - low
        q *= inverse(d)
        q += np.float32(0.5)
        return [d, low], np.minimum(q, np.float32(levels), out=q).astype(np.uint8)

    return encode


def _encode_iq4_nl(x: _Columns) -> _Coded:
    extreme = first_extreme(x)
    coded = np.abs(extreme) >= _IQ4_NL_EPS
    guess = extreme / _IQ4_NL_VALUES[0]
    index = count_not_above(x * inverse(guess), IQ4_NL_CODEBOOK.boundaries)
    weighted = x * x
    q = _IQ4_NL_VALUES[index]
    weighted *= q
    sum_qx = ordered_sum(weighted * x)
    weighted *= q
    sum_q2 = ordered_sum(weighted)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        d = np.where(coded & (sum_q2 > 0), sum_qx / sum_q2, np.float32(0))
    d = np.where(np.isfinite(d), d, guess)
    index[:, ~coded] = np.searchsorted(IQ4_NL_CODEBOOK.boundaries, 0, side="right")
    return [d], index


_ENCODERS: dict[str, Callable[[_Columns], _Coded]] = {
    "q8_0": _encode_q8_0,
    "q5_1": _encode_affine(31),
    "q5_0": _encode_symmetric(16),
    "q4_1": _encode_affine(15),
    "q4_0": _encode_symmetric(8),
    "iq4_nl": _encode_iq4_nl,
}
# what is subtracted from a code before it is scaled
_ZERO_CODE = {"q5_0": 16, "q4_0": 8}


@dataclass(frozen=True, eq=False)
class GgmlKernel:
    """Encodes and decodes blocks of 32 values of one of ggml's quantised types."""

    block_type: BlockType

    def encode(self, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Finite float32 [n, 32] to blocks uint8 [n, block_bytes]."""
        out = np.empty((len(x), self.block_type.block_bytes), np.uint8)
        n_scales = self.block_type.n_scales
        for start in range(0, len(x), _STEP):
            columns = np.ascontiguousarray(x[start : start + _STEP].T)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                scales, index = _ENCODERS[self.block_type.name](columns)
            blocks = out[start : start + _STEP]
            stored = np.stack([np.clip(s, -F16_MAX, F16_MAX).astype("<f2") for s in scales], axis=1)
            blocks[:, : 2 * n_scales] = stored.view(np.uint8)
            self._pack(index, blocks[:, 2 * n_scales :])
        return out

    def _pack(self, index: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Codes uint8 [32, n] to out [n, code_bytes]; value j and value j + 16 share a byte, j in the low nibble."""
        if self.block_type.bits == 8:
            out[...] = index.T
            return
        if self.block_type.bits == 5:
            out[:, :4] = np.packbits(index >> np.uint8(4), axis=0, bitorder="little").T
        out[:, -16:] = ((index[:16] & np.uint8(15)) | (index[16:] << np.uint8(4))).T

    def decode(
        self, codes: NDArray[np.uint8], scales: NDArray[np.float16], out: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """codes uint8 [n, code_bytes] and scales float16 [n, n_scales] to out float32 [n, 32]."""
        for start in range(0, len(codes), _STEP):
            rows = slice(start, start + _STEP)
            values, factors = out[rows], scales[rows].astype(np.float32)
            if self.block_type.bits == 8:
                values[...] = codes[rows].view(np.int8)
            elif self.block_type.name == "iq4_nl":
                np.take(_IQ4_NL_VALUES, self._unpack(codes[rows]), out=values, mode="clip")
            else:
                values[...] = self._unpack(codes[rows])
                if zero := _ZERO_CODE.get(self.block_type.name):
                    values -= np.float32(zero)
            values *= factors[:, :1]
            if self.block_type.n_scales == 2:
                values += factors[:, 1:]
        return out

    def _unpack(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Code bytes [n, code_bytes] of a 4 or 5 bit type to codes uint8 [n, 32]."""
        index = np.empty((len(codes), QK), np.uint8)
        np.bitwise_and(codes[:, -16:], np.uint8(15), out=index[:, :16])
        np.right_shift(codes[:, -16:], np.uint8(4), out=index[:, 16:])
        if self.block_type.bits == 5:
            high = np.unpackbits(codes[:, :4], axis=1, bitorder="little")
            high <<= np.uint8(4)
            index |= high
        return index


@dataclass(frozen=True, eq=False)
class FloatKernel:
    """Encodes and decodes the float types; a block is one value."""

    block_type: BlockType

    def encode(self, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Finite float32 [n, 1] to little-endian uint8 [n, itemsize], rounded to nearest even, clamped to finite."""
        if self.block_type.name == "f32":
            return np.ascontiguousarray(x, "<f4").view(np.uint8)
        if self.block_type.name == "f16":
            return np.ascontiguousarray(np.clip(x, -F16_MAX, F16_MAX).astype("<f2")).view(np.uint8)
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
        rounded -= (rounded & np.uint16(0x7FFF)) == np.uint16(0x7F80)  # infinity back to the largest finite value
        return rounded.view(np.uint8)

    def decode(
        self, codes: NDArray[np.uint8], scales: NDArray[np.float16], out: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """codes uint8 [n, itemsize] to out float32 [n, 1]; `scales` is empty."""
        codes = np.ascontiguousarray(codes)
        if self.block_type.name == "bf16":
            np.left_shift(codes.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
        else:
            out[...] = codes.view("<f4" if self.block_type.name == "f32" else "<f2")
        return out
