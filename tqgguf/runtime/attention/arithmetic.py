"""The operations of attention over tiles, by numpy and by MLX: float32 arrays of each one's own kind."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from tqgguf.runtime.attention.products import product
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.pages import SidePages


class Arithmetic(Protocol):
    """xp: numpy or mlx.core, whose arrays these are."""

    xp: Any

    def load(self, *arrays: mx.array) -> list[Any]:
        """Float arrays in float32."""

    def decode(self, side: SidePages, first: int, last: int) -> Any:
        """Blocks of pages first .. last - 1, [n_kv_heads, tokens, head_dim], rotated."""

    def matmul(self, a: Any, b: Any) -> Any:
        """[n, rows, inner] @ [n, inner, columns]."""

    def rotate(self, side: SidePages, x: Any) -> Any:
        """[..., head_dim] into the side's rotated domain."""

    def unrotate(self, side: SidePages, x: Any) -> Any:
        """[..., head_dim] out of the side's rotated domain."""


class NumpyArithmetic(Arithmetic):
    """Byte tables for decoding, BLAS for the products. Evaluates what it reads."""

    xp: Any = np

    def load(self, *arrays: mx.array) -> list[Any]:
        mx.eval(arrays)
        held = (np.asarray(a.astype(mx.float32) if a.dtype == mx.bfloat16 else a) for a in arrays)
        return [a.astype(np.float32, copy=False) for a in held]

    def decode(self, side: SidePages, first: int, last: int) -> Any:
        lo, hi = first - side.first_page, last - side.first_page
        codes = np.asarray(side.codes)[lo:hi].swapaxes(0, 1)
        scales = np.asarray(side.scales)[lo:hi].swapaxes(0, 1)
        values = side.codec.decode_planes(np.ascontiguousarray(codes), np.ascontiguousarray(scales))
        return values.reshape(len(values), -1, side.codec.head_dim)

    def matmul(self, a: Any, b: Any) -> Any:
        return product(a, b)

    def rotate(self, side: SidePages, x: Any) -> Any:
        return side.codec.rotate(x)

    def unrotate(self, side: SidePages, x: Any) -> Any:
        return side.codec.unrotate(x)


class MlxArithmetic(Arithmetic):
    """In operations of MLX, lazily."""

    xp: Any = mx

    def load(self, *arrays: mx.array) -> list[Any]:
        return [a.astype(mx.float32) for a in arrays]

    def decode(self, side: SidePages, first: int, last: int) -> Any:
        assert side.codes is not None and side.scales is not None
        lo, hi = first - side.first_page, last - side.first_page
        rows = block_ops.decode_rotated(side.codec, side.codes[lo:hi], side.scales[lo:hi]).swapaxes(0, 1)
        return rows.reshape(rows.shape[0], -1, side.codec.head_dim)

    def matmul(self, a: Any, b: Any) -> Any:
        return mx.matmul(a, b)

    def rotate(self, side: SidePages, x: Any) -> Any:
        return block_ops.rotate(side.codec.rotation, x)

    def unrotate(self, side: SidePages, x: Any) -> Any:
        return block_ops.unrotate(side.codec.rotation, x)
