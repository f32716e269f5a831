"""The order of a key's channels: RoPE turns neighbouring values together in some engines' caches, halves in others'.

llama.cpp's converter permutes the projections of llama-like models, so that its keys have neighbours; mlx-lm keeps the
halves of the original weights. The values are the same, in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.snapshots.snapshot import Rows


def channel_order(head_dim: int, held: RopeLayout, wanted: RopeLayout) -> NDArray[np.intp] | None:
    """The channels of `held` in the order of `wanted`; None where the two are the same."""
    if held.traditional == wanted.traditional or not held.dims:
        return None
    order = np.arange(head_dim)
    order[wanted.pairs()] = held.pairs()
    return order


@dataclass(frozen=True, eq=False)
class ReorderedRows:
    """Rows of a float type, whose values have `value_bytes` bytes, with their channels in another order."""

    rows: Rows
    order: NDArray[np.intp]
    value_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        rows = self.rows[tokens]
        values = rows.reshape(*rows.shape[:-1], -1, self.value_bytes)
        return values[..., self.order, :].reshape(rows.shape)
