"""The Walsh-Hadamard rotation that spreads a head vector's energy evenly before it is coded.

Signed (turbo types): y = s2 * (H (s1 * x)) / sqrt(size). Sign-less (llama.cpp's rotation of quantised caches):
y = H x / sqrt(size), its own inverse. H is in natural (Sylvester) order. Operations are float32 in a fixed order, so
that the bytes a codec makes of them are the same everywhere. Which size a cache type takes is decided in `codec`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Signs = tuple[NDArray[np.float32], NDArray[np.float32]]

# Bit i of the little-endian string = 1 means that entry i is -1. Source: the turbo forks' tables (128 entries).
SIGNS_1_HEX = "59036ae44959f842bb3bc6a4a950f249"
SIGNS_2_HEX = "90eeac16dc8f623f7a35a5b76265a5be"
MAX_SIGNED_SIZE = 128

_CHUNK_VALUES = 1 << 15  # two float32 buffers of this many values stay in a core's L2 cache


def sign_table(hex_bits: str) -> NDArray[np.float32]:
    """The float32 table of +1 and -1 that a hex string of sign bits stands for."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(hex_bits), np.uint8), bitorder="little")
    return np.where(bits, np.float32(-1), np.float32(1)).astype(np.float32)


def butterflies(x: NDArray[np.float32], spare: NDArray[np.float32]) -> NDArray[np.float32]:
    """Unscaled Walsh-Hadamard transform over axis 1 of x, float32 [parts, size, n].

    Half-widths 1, 2, 4, ... size / 2, each (a, b) -> (a + b, a - b). Overwrites both buffers (equal shapes) and
    returns the one that holds the result.
    """
    parts, size, n = x.shape
    half = 1
    while half < size:
        src = x.reshape(parts, size // (2 * half), 2, half, n)
        dst = spare.reshape(src.shape)
        np.add(src[:, :, 0], src[:, :, 1], out=dst[:, :, 0])
        np.subtract(src[:, :, 0], src[:, :, 1], out=dst[:, :, 1])
        x, spare = spare, x
        half *= 2
    return x


@dataclass(frozen=True)
class Rotation:
    """An orthonormal rotation of consecutive parts of `size` values (a power of two; at most 128 when signed)."""

    size: int
    signed: bool

    def __post_init__(self) -> None:
        if self.size < 1 or self.size & (self.size - 1) or (self.signed and self.size > MAX_SIGNED_SIZE):
            limit = f" up to {MAX_SIGNED_SIZE}" if self.signed else ""
            raise ValueError(f"rotation size must be a power of two{limit}, found {self.size}")

    @cached_property
    def factor(self) -> np.float32:
        """1 / sqrt(size), rounded to float32."""
        return np.float32(1.0 / math.sqrt(self.size))

    @cached_property
    def signs(self) -> Signs | None:
        """(s1, s2), float32 [size] each, or None when sign-less."""
        if not self.signed:
            return None
        return sign_table(SIGNS_1_HEX)[: self.size], sign_table(SIGNS_2_HEX)[: self.size]

    def forward(self, x: ArrayLike) -> NDArray[np.float32]:
        """Rotate float[..., k * size] over its last axis; float32 of the same shape."""
        return self._apply(x, self.signs)

    def inverse(self, x: ArrayLike) -> NDArray[np.float32]:
        """Undo `forward`: the same steps with s1 and s2 swapped."""
        return self._apply(x, None if self.signs is None else self.signs[::-1])

    def columns(self, x: NDArray[np.float32], spare: NDArray[np.float32]) -> NDArray[np.float32]:
        """`forward` for vectors that are columns, float32 [k * size, n]; overwrites both buffers, returns one."""
        return self._columns(x, spare, self.signs)

    def _columns(self, x: NDArray[np.float32], spare: NDArray[np.float32], signs: Signs | None) -> NDArray[np.float32]:
        shape = x.shape
        x = x.reshape(-1, self.size, shape[-1])
        if signs is not None:
            x *= signs[0][:, None]
        x = butterflies(x, spare.reshape(x.shape))
        x *= self.factor if signs is None else (signs[1] * self.factor)[:, None]
        return x.reshape(shape)

    def _apply(self, x: ArrayLike, signs: Signs | None) -> NDArray[np.float32]:
        values = np.asarray(x)
        if values.ndim == 0 or values.shape[-1] % self.size:
            raise ValueError(f"a rotation of size {self.size} needs a last axis that it divides, found {values.shape}")
        rows = values.reshape(values.size // self.size, self.size)
        out = np.empty(rows.shape, np.float32)
        step = max(1, _CHUNK_VALUES // self.size)
        buffers = np.empty((2, self.size, min(step, len(rows))), np.float32)
        for start in range(0, len(rows), step):
            n = min(step, len(rows) - start)
            columns, spare = (b.reshape(-1)[: self.size * n].reshape(self.size, n) for b in buffers)
            columns[...] = rows[start : start + n].T
            out[start : start + n] = self._columns(columns, spare, signs).T
        return out.reshape(values.shape)
