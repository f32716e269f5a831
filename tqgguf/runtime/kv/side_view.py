"""What a step of attention may read of one side (K or V) of one layer, by absolute token position.

Knows nothing of how a cache stores it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.kernels.tiles import to_rows
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.balance import unbalance_pages

PAGE = PAGE_TOKENS

ROLLBACK_TOKENS = PAGE
"""Tokens that can be taken back as if they had never been fed: the length of a draft, with room to spare. More would
take more rows in f16 than those of the last whole page."""


@dataclass(frozen=True)
class SideView:
    """What attention reads of one side after an update. Rows are [n_kv_heads, tokens, head_dim].

    rows/rows_start: rows in their float type from that position to the end (own page, or everything for float types).
    codes/scales/pages_start: planes [pages, n_kv_heads, PAGE, ...] of whole pages, from that page on; None for floats.
    prefix: f16 rows of the exact prefix, held apart from the blocks of page 0.
    page_means: f16 [pages, n_kv_heads, head_dim] subtracted from each page before encoding, or None.
    channel_scale: f32 [n_kv_heads, head_dim] multiplied into K before encoding (undone on the query), or None.
    tiled: a page's codes are in the order of `kernels.tiles`, not row by row.
    host: `rows` as numpy, where a float side has them so: who reads those need not evaluate `rows`.
    """

    codec: Codec
    rows: mx.array
    rows_start: int
    codes: mx.array | None = None
    scales: mx.array | None = None
    pages_start: int = 0
    prefix: mx.array | None = None
    page_means: mx.array | None = None
    channel_scale: mx.array | None = None
    tiled: bool = False
    host: NDArray[Any] | None = None
    kept: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    """What a backend prepares from everything but the rows; views that differ in their rows only share it."""

    def with_rows(self, rows: mx.array) -> SideView:
        """The same pages with other rows of the page after them. Not `replace`, which takes ten times as long."""
        view = object.__new__(SideView)
        view.__dict__.update(self.__dict__)
        view.__dict__["rows"] = rows
        return view

    @property
    def first_page(self) -> int:
        """The first page held."""
        return self.rows_start // PAGE if self.codec.is_float else self.pages_start

    @property
    def end_page(self) -> int:
        """The page after the last one that can be read as blocks, or is whole in a float type."""
        if self.codec.is_float:
            return (self.rows_start + self.rows.shape[1]) // PAGE
        return self.pages_start + (0 if self.codes is None else self.codes.shape[0])

    def starting_at(self, page: int) -> SideView:
        """Without the pages before `page`, which is no later than the one of `rows`' end."""
        if page <= self.first_page:
            return self
        if self.codec.is_float:
            cut = page * PAGE - self.rows_start
            host = None if self.host is None else self.host[:, cut:]
            return replace(self, rows=self.rows[:, cut:], host=host, rows_start=page * PAGE)
        cut = page - self.pages_start
        parts = (self.codes, self.scales, self.page_means)
        codes, scales, means = (None if part is None else part[cut:] for part in parts)
        return replace(self, codes=codes, scales=scales, page_means=means, pages_start=page, prefix=None)

    def decoded(self, first: int, last: int) -> mx.array:
        """Rows f32 [n_kv_heads, tokens, head_dim] in original axes that pages first .. last - 1 decode to, lazily."""
        lo, hi = first - self.pages_start, last - self.pages_start
        assert self.codes is not None and self.scales is not None
        codes = to_rows(self.codec, self.codes[lo:hi]) if self.tiled else self.codes[lo:hi]
        rows = block_ops.decode_pages(self.codec, codes, self.scales[lo:hi])
        return rows if self.page_means is None else unbalance_pages(rows, self.page_means[lo:hi], self.channel_scale)


def prefix_length(k: SideView, v: SideView) -> int:
    """Tokens of the exact prefix that a side holds apart from its blocks; 0 where neither does."""
    return next((side.prefix.shape[1] for side in (k, v) if side.prefix is not None), 0)


def first_seen_page(offset: int, window: int | None) -> int:
    """The first page that a query at `offset` or later can see."""
    return 0 if window is None else max(0, offset - window + 1) // PAGE


def first_read_page(k: SideView, v: SideView, offset: int, window: int | None) -> int:
    """The first page that is held and that a query at `offset` or later can see."""
    return max(k.first_page, v.first_page, first_seen_page(offset, window))


def cuts(start: int, end: int, step: int = PAGE) -> list[int]:
    """The range start .. end cut at absolute multiples of `step`, both ends included."""
    return [start, *range((start // step + 1) * step, end, step), end]
