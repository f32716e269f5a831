"""A layer's tails in arrays of a page's length, while steps of fixed shapes fill them. Knows nothing of those steps."""

from __future__ import annotations

import mlx.core as mx

from tqgguf.runtime.kv.side_view import PAGE
from tqgguf.runtime.kv.sides import BlockSide


class LentTails:
    """K's and V's rows after their last whole page, f16 [n_kv_heads, PAGE, head_dim], of which the first n_rows are
    there. The sides get them back by `join`, and not before. arrays: what else of the sides steps read until then."""

    def __init__(self, sides: tuple[BlockSide, BlockSide], arrays: list[mx.array]) -> None:
        self.arrays = arrays
        self._sides = sides
        tails = [side.tail for side in sides]
        self.n_rows = 0 if tails[0] is None else tails[0].shape[1]
        k, v = (side.to_length(side.tail, PAGE) for side in sides)
        self.rows: tuple[mx.array, mx.array] = k, v

    def take(self, rows: tuple[mx.array, mx.array], n_rows: int) -> None:
        """Other arrays in which n_rows are there."""
        self.rows, self.n_rows = rows, n_rows

    def join(self) -> None:
        """Give the sides their tails."""
        for side, rows in zip(self._sides, self.rows, strict=True):
            side.tail = rows[:, : self.n_rows] if self.n_rows else None
        self.arrays = []  # whoever still holds these must not make planes be copied when they grow
