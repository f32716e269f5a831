"""Rows of mlx-lm's caches as a snapshot wants them: token by token, as uint8, made slice by slice while they are read.

mlx-lm keeps arrays [1, n_kv_heads, tokens, head_dim], those of sliding windows as rings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.errors import EncodeError, FormatError
from tqgguf.formats.mlx.affine import dequantise
from tqgguf.formats.mlx.cache import MlxArray


@dataclass(frozen=True, eq=False)
class FloatRows:
    """Values as they are. places: of each token in the array, in order."""

    array: MlxArray
    places: NDArray[np.intp]

    @property
    def shape(self) -> tuple[int, ...]:
        _, n_heads, _, head_dim = self.array.data.shape
        return len(self.places), n_heads, head_dim * self.array.data.itemsize

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        values = self.array.data[0][:, self.places[tokens]].swapaxes(0, 1)
        return np.ascontiguousarray(values).view(np.uint8)


@dataclass(frozen=True, eq=False)
class AffineRows:
    """Quantised values, decoded into a float type. arrays: codes, scales and biases. where: for messages."""

    arrays: tuple[MlxArray, ...]
    places: NDArray[np.intp]
    bits: int
    codec: StoredCodec
    where: str

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.places), self.arrays[0].data.shape[1], self.codec.row_bytes

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        words, scales, biases = (array.data[0][:, self.places[tokens]].swapaxes(0, 1) for array in self.arrays)
        values = dequantise(words, as_float32(scales), as_float32(biases), self.bits)
        try:
            return self.codec.encode(values)
        except EncodeError as error:
            cache_type = self.codec.cache_type
            raise FormatError(f"{self.where}: expected values that {cache_type} holds: {error}") from error


def as_float32(values: NDArray) -> NDArray[np.float32]:
    """float16, float32, or uint16 bits of bfloat16."""
    if values.dtype.kind == "u":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
