"""A GGUF's matrices on a GPU in their own blocks, between activations of half precision: the modules that hold them.

A decode step is bound by the bytes that it reads, and nothing is smaller than what the file holds. A few rows are
multiplied straight from the blocks; for more, runs of the matrix's rows are decoded to half precision into a workspace
of bounded size for MLX's product. Knows mlx's modules and the kernels; knows neither files nor models.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from tqgguf.runtime.kernels.launch import Launcher
from tqgguf.runtime.kernels.matrices import (
    MOST_PRODUCT_ROWS,
    TILE_ROWS,
    BlockMatrix,
    decode_matrix,
    lookup_rows,
    multiply,
)

WORKSPACE_VALUES = 1 << 27
"""Values of a matrix that are decoded at a time for products of many rows: 256 MB."""


class BlockRows(nn.Module):
    """A matrix [n_rows, n] on the device, in a Linear's place; activations are of `dtype` (f16 or bf16).

    weight: its blocks, uint32, as the kernels read them. bias: float32 [n_rows], where there is one. gate: 'silu' or
    'gelu', where the matrix is two whose tiles take turns (see `kernels.matrices.multiply`).
    """

    def __init__(
        self,
        launcher: Launcher,
        matrix: BlockMatrix,
        dtype: mx.Dtype,
        bias: mx.array | None = None,
        gate: str | None = None,
    ) -> None:
        super().__init__()
        self.weight = matrix.planes
        if bias is not None:
            self.bias = bias
        self._launcher, self._sizes, self._gate = launcher, (matrix.type, matrix.n_rows, matrix.n_columns), gate
        self.dtype = dtype

    @property
    def matrix(self) -> BlockMatrix:
        return BlockMatrix(*self._sizes, self.weight)

    def lookup(self, ids: mx.array) -> mx.array:
        """Rows by number: ids [...] to [..., n]."""
        found = lookup_rows(self._launcher, self.matrix, ids.reshape(-1).astype(mx.int32), self.dtype)
        return found.reshape(*ids.shape, -1)

    def __call__(self, x: mx.array, added: mx.array | None = None, norm: mx.array | None = None) -> mx.array:
        """x [..., n] times the matrix, [..., n_rows] (half as many with a gate). added: of the result's shape and
        dtype, added before it is rounded where rows are few. norm: see `multiply`; x must be one row of `dtype`."""
        rows = x.astype(self.dtype).reshape(-1, x.shape[-1])
        others = [] if added is None else [added.reshape(rows.shape[0], -1)]
        others += [self.bias] if "bias" in self else []
        if rows.shape[0] <= MOST_PRODUCT_ROWS:
            fused = others.pop(0) if others else None
            out = multiply(self._launcher, rows, self.matrix, added=fused, gate=self._gate, norm=norm)
        else:
            out = _gated(self._many(rows), self._gate)
        for other in others:
            out = out + other.astype(self.dtype)
        return out.reshape(*x.shape[:-1], -1)

    def logits(self, x: mx.array) -> mx.array:
        """x [..., n] times the matrix as float32 [..., n_rows], never rounded to less: rows in small groups."""
        rows = x.astype(self.dtype).reshape(-1, x.shape[-1])
        groups = [rows[i : i + MOST_PRODUCT_ROWS] for i in range(0, rows.shape[0], MOST_PRODUCT_ROWS)]
        parts = [multiply(self._launcher, group, self.matrix, dtype=mx.float32) for group in groups]
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return out.reshape(*x.shape[:-1], -1)

    def _many(self, rows: mx.array) -> mx.array:
        matrix = self.matrix
        step = max(TILE_ROWS, WORKSPACE_VALUES // matrix.n_columns // TILE_ROWS * TILE_ROWS)
        runs = [(first, min(step, matrix.n_rows - first)) for first in range(0, matrix.n_rows, step)]
        parts = [rows @ decode_matrix(self._launcher, matrix, self.dtype, *run).T for run in runs]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _gated(products: mx.array, gate: str | None) -> mx.array:
    if gate is None:
        return products
    turns = products.reshape(products.shape[0], -1, 2, TILE_ROWS)
    activated = nn.silu(turns[:, :, 0]) if gate == "silu" else nn.gelu_approx(turns[:, :, 0])
    return (activated * turns[:, :, 1]).reshape(products.shape[0], -1)


class BlockEmbedding(nn.Module):
    """An Embedding whose weight is `rows`."""

    def __init__(self, rows: BlockRows) -> None:
        super().__init__()
        self.rows = rows

    def __call__(self, ids: mx.array) -> mx.array:
        return self.rows.lookup(ids)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.rows.logits(x)


class BlockOutput(nn.Module):
    """The output layer, whose weight is `rows`: logits are float32."""

    def __init__(self, rows: BlockRows) -> None:
        super().__init__()
        self.rows = rows

    def __call__(self, x: mx.array) -> mx.array:
        return self.rows.logits(x)
