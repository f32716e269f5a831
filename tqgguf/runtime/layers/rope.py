"""RoPE beyond mlx's own: with one factor per pair (llama 3's context extension), and quick for one row on a CPU.

mlx's RoPE is some thirty operations on a CPU, each with more overhead than work when there is one row. A rotation at
one position is a matrix, the same for all heads and layers: one product instead.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from tqgguf.formats.models.config import ModelConfig


class FactoredRoPE(nn.Module):
    """RoPE whose wavelengths are multiplied by `factors` [rope_dim / 2]; `traditional`: pairs are neighbours."""

    def __init__(self, config: ModelConfig, traditional: bool, factors: NDArray[np.float32]) -> None:
        super().__init__()
        self.dims, self.traditional, self._scale = config.rope_dim, traditional, 1.0 / config.rope_factor
        exponents = np.arange(0, config.rope_dim, 2, dtype=np.float64) / config.rope_dim
        self._freqs = mx.array((config.rope_theta**exponents * factors).astype(np.float32))

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=self._scale, offset=offset, freqs=self._freqs
        )


class RowRoPE(nn.Module):
    """mlx's `nn.RoPE`, by a matrix where x [1, n_heads, 1, head_dim] is one float32 row at a known position."""

    def __init__(self, rope: nn.RoPE) -> None:
        super().__init__()
        self._rope = rope
        self.dims, self.traditional = rope.dims, rope.traditional

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if x.shape[-2] != 1 or x.dtype != mx.float32 or not isinstance(offset, int):
            return self._rope(x, offset)
        rope = self._rope
        return x @ _rotation(rope.dims, x.shape[-1], rope.traditional, rope.base, rope.scale, offset)


def _plain_frequencies(dims: int, base: float) -> NDArray[np.float32]:
    pair = np.arange(dims // 2).astype(np.float32)
    return np.exp(-pair * np.float32(math.log(base) / (dims // 2)))


class Turns:
    """Cosines and sines of a RoPE's angles, as mlx rounds those. Layers of one RoPE share one of these."""

    def __init__(self, rope: nn.RoPE | FactoredRoPE) -> None:
        if isinstance(rope, FactoredRoPE):
            self._scale, self._frequencies = np.float32(rope._scale), np.reciprocal(np.array(rope._freqs))
        else:
            self._scale, self._frequencies = np.float32(rope.scale), _plain_frequencies(rope.dims, rope.base)
        self._last: tuple[tuple[int, int], NDArray[np.float32]] | None = None

    def is_of(self, other: Turns) -> bool:
        """Whether both are of one RoPE."""
        return self._scale == other._scale and np.array_equal(self._frequencies, other._frequencies)

    def at(self, first: int, n: int) -> NDArray[np.float32]:
        """Of n positions from `first` on: float32 [n, 2, pairs]."""
        if self._last is None or self._last[0] != (first, n):
            positions = np.arange(first, first + n, dtype=np.float32) * self._scale
            angles = (positions[:, None] * self._frequencies).astype(np.float64)
            values = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
            self._last = (first, n), values
        return self._last[1]


@lru_cache(maxsize=8)
def _rotation(dims: int, head_dim: int, traditional: bool, base: float, scale: float, position: int) -> mx.array:
    """float32 [head_dim, head_dim] that turns each pair of a row's first `dims` values by its angle at `position`."""
    pair = np.arange(dims // 2)
    # angles as mlx rounds them, so that a row is turned alike in a prompt and alone
    angle = np.float32(position) * np.float32(scale) * _plain_frequencies(dims, base)
    first, second = (2 * pair, 2 * pair + 1) if traditional else (pair, pair + dims // 2)
    matrix = np.eye(head_dim)
    matrix[first, first] = matrix[second, second] = np.cos(angle)
    matrix[first, second], matrix[second, first] = np.sin(angle), -np.sin(angle)
    return mx.array(matrix.astype(np.float32))


def put_row_rope(model: nn.Module) -> None:
    """Let every plain RoPE of a model take single rows by a matrix."""
    places = [(path, RowRoPE(module)) for path, module in model.named_modules() if type(module) is nn.RoPE]
    model.update_modules(tree_unflatten(places))
