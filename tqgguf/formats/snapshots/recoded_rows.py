"""Rows of one side of a snapshot in another codec, or in the same without balance and exact prefix.

Rows that stay in their codec are copied; the f16 tail and exact prefix, which were never quantised, are encoded. Made
slice by slice while they are read, so that no second copy of a cache is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.balance import unbalance_rows
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.stored_codec import StoredCodec
from tqgguf.formats.snapshots.snapshot import SideSnapshot


def must_requantise(side: SideSnapshot, codec: StoredCodec, order: NDArray[np.intp] | None = None) -> bool:
    """Whether rows that are quantised already would be quantised again to have them in a codec, unbalanced, and with
    their channels in another order.
    """
    n_blocks = side.rows.shape[0] - (0 if side.prefix is None else len(side.prefix))
    changes = side.codec != codec or side.page_means is not None or order is not None
    return n_blocks > 0 and not side.codec.is_float and changes


@dataclass(frozen=True, eq=False)
class RecodedRows:
    """All tokens of a side from `start` on (the position of its first row), uint8 [tokens, n_kv_heads, row_bytes].
    order: of the channels, None where it stays.
    """

    side: SideSnapshot
    codec: StoredCodec
    start: int = 0
    order: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.side.n_tokens, self.side.rows.shape[1], self.codec.row_bytes

    def __getitem__(self, tokens: slice, /) -> NDArray[np.uint8]:
        first, last, _ = tokens.indices(self.side.n_tokens)
        n_rows = self.side.rows.shape[0]
        n_exact = 0 if self.side.prefix is None else len(self.side.prefix)
        bounds = sorted({first, last, *(i for i in (n_exact, n_rows) if first < i < last)})
        pieces = [self._piece(a, b, n_exact, n_rows) for a, b in pairwise(bounds)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self._empty()])

    def _empty(self) -> NDArray[np.uint8]:
        return np.empty((0, *self.shape[1:]), np.uint8)

    def _piece(self, first: int, last: int, n_exact: int, n_rows: int) -> NDArray[np.uint8]:
        """Tokens that are all of the exact prefix, all of the rows behind it, or all of the tail."""
        side = self.side
        if first >= n_rows:
            assert side.tail is not None
            return self._encoded(side.tail[first - n_rows : last - n_rows])
        if first < n_exact:
            assert side.prefix is not None
            return self._encoded(side.prefix[first:last])
        rows = side.rows[first:last]
        if side.codec == self.codec and side.page_means is None and self.order is None:
            return rows
        return self._encoded(self._values(rows, first))

    def _encoded(self, values: NDArray[np.floating]) -> NDArray[np.uint8]:
        return self.codec.encode(values if self.order is None else values[..., self.order])

    def _values(self, rows: NDArray[np.uint8], first: int) -> NDArray[np.float32]:
        """Rows from token `first` on as float32 [tokens, n_kv_heads, head_dim] in original axes, unbalanced."""
        values = self.side.codec.decode(rows)
        means = self.side.page_means
        if means is None:
            return values
        first_page = -(-self.start // PAGE_TOKENS)
        out = np.empty_like(values)
        at = self.start + first
        begin = 0
        while begin < len(values):
            page = (at + begin) // PAGE_TOKENS
            end = min(len(values), (page + 1) * PAGE_TOKENS - at)
            by_head = values[begin:end].swapaxes(0, 1)
            whole = unbalance_rows(by_head, means[page - first_page], self.side.channel_scale)
            out[begin:end] = whole.swapaxes(0, 1)
            begin = end
        return out
