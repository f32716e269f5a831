"""What kernels know of codecs: the types that they read, and a codec's constants as their arguments.

Every number about a codec comes from formats/; here it becomes a template argument or a small array. Arrays have at
least eight elements: Metal takes smaller ones for another address space.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from tqgguf.formats.blocks.codec import Codec
from tqgguf.formats.blocks.rotation import Rotation

KERNEL_TYPES = {"f16": 0, "turbo2": 2, "turbo3": 3, "turbo4": 4, "q8_0": 8, "q4_0": 40}
"""Cache types that kernels read, by their number in codes.metal."""

MOST_HEAD_DIM = 512
"""Head sizes beyond it need more threadgroup memory than Metal has."""

_LANES = 32  # of a simdgroup: vectors lie across it, so that head sizes and rotations are multiples
_FLOAT_GROUP = 32  # values that a lane's parts of an f16 row are taken from together
_BOOK_SIZE = 16
_SMALL_BLOCK_FACTOR = 16  # ggml's values are read as value / 16 (scale_factor in codes.metal)


def is_supported(codec: Codec) -> bool:
    """Whether the kernels read this codec."""
    size = _LANES if codec.rotation is None else codec.rotation.size
    fits = codec.head_dim <= MOST_HEAD_DIM and codec.head_dim % _LANES == 0 and size % _LANES == 0
    return codec.cache_type in KERNEL_TYPES and fits


def group_of(codec: Codec) -> int:
    """Values whose codes lie together: a block, or what is read at a time of an f16 row."""
    return _FLOAT_GROUP if codec.is_float else codec.block_size


def rotation_size(codec: Codec) -> int:
    """Values that are rotated together; 1 without a rotation."""
    return 1 if codec.rotation is None else codec.rotation.size


def bits_of(codec: Codec) -> int:
    """Bits of a code that is looked up in a table of values; 0 for types that are computed."""
    return 0 if codec.cache_type in ("f16", "q8_0") else codec.block_type.bits


@lru_cache(maxsize=64)
def book(codec: Codec) -> mx.array:
    """The value of every code, float32 [16]."""
    values = np.zeros(_BOOK_SIZE, np.float32)
    if codec.codebook is not None:
        values[: len(codec.codebook)] = codec.codebook
    elif codec.cache_type == "q4_0":
        values[:] = (np.arange(_BOOK_SIZE, dtype=np.float32) - 8) / _SMALL_BLOCK_FACTOR
    return mx.array(values)


@lru_cache(maxsize=64)
def boundaries(codec: Codec) -> mx.array:
    """Decision boundaries between codes, float32 [16]."""
    values = np.zeros(_BOOK_SIZE, np.float32)
    if codec.boundaries is not None:
        values[: len(codec.boundaries)] = codec.boundaries
    return mx.array(values)


def signs(codec: Codec) -> mx.array:
    """Factors before and after a codec's Walsh-Hadamard transform, float32 [2 * size], its 1 / sqrt(size) in the
    latter."""
    return _signs(codec.rotation)


@lru_cache(maxsize=64)
def _signs(rotation: Rotation | None) -> mx.array:
    if rotation is None:
        return nothing(mx.float32)
    before, after = rotation.signs or (np.ones(rotation.size, np.float32),) * 2
    return mx.array(np.concatenate([before, after * rotation.factor]))


@lru_cache(maxsize=8)
def nothing(dtype: mx.Dtype) -> mx.array:
    """What stands for an input that an instantiation does not read."""
    zeros = mx.zeros((8,), dtype=dtype)
    mx.eval(zeros)  # threads share it
    return zeros


def given(array: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """An input that may be missing."""
    return nothing(dtype) if array is None else array
