"""The balance of one layer's K while its cache grows: the channel scale, and the queries that it is made from.

The arithmetic is `formats.balance`'s; here are the arrays as MLX has them. Knows nothing of pages beyond page 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tqgguf.formats.blocks import balance
from tqgguf.formats.blocks.balance import RopeLayout
from tqgguf.formats.blocks.block_types import PAGE_TOKENS
from tqgguf.formats.errors import RequestError


def page_mean_numpy(rows: mx.array, n_skipped: int) -> mx.array:
    """`balance.page_mean` with the exact bytes of the format. Evaluates `rows`."""
    return mx.array(balance.page_mean(np.asarray(rows), n_skipped))


def page_mean_mlx(rows: mx.array, n_skipped: int) -> mx.array:
    """`balance.page_mean` in MLX operations: another order of additions, so that a mean may differ by one ulp. The same
    rows are left out."""
    values = rows[:, n_skipped:].astype(mx.float32)
    if not values.shape[1]:
        return mx.zeros((rows.shape[0], rows.shape[2]), dtype=mx.float16)
    counts = _counted(values)
    share = 1 / mx.maximum(counts.sum(axis=1), 1)
    return (mx.where(counts, values, 0.0).sum(axis=1) * share).astype(mx.float16)


def _counted(values: mx.array) -> mx.array:
    """`balance.counted_rows` of f32 [n_kv_heads, tokens, head_dim], tokens > 0: [n_kv_heads, tokens, 1]."""
    middle = slice((values.shape[1] - 1) // 2, (values.shape[1] - 1) // 2 + 1)
    reach = mx.abs(values - mx.sort(values, axis=1)[:, middle]).max(axis=2, keepdims=True)
    return (reach <= balance.FAR_OUTSIDE * mx.sort(reach, axis=1)[:, middle]) & (reach < math.inf)


def page_scale_numpy(
    page: mx.array, mean: mx.array, query_squares: mx.array | None, n_skipped: int, layout: RopeLayout
) -> mx.array:
    """`balance.channel_scale` of page 0, f16 [n_kv_heads, PAGE, head_dim], its mean, and its queries' squares
    [n_kv_heads, up to PAGE, head_dim] (see `ChannelScale`). Evaluates them."""
    key_squares = balance.centred_squares(np.asarray(page), np.asarray(mean), n_skipped)
    queries = np.zeros((1, 1, 1)) if query_squares is None else np.asarray(query_squares)[:, n_skipped:]
    summed = np.broadcast_to(balance.summed_queries(queries), key_squares.shape)
    return mx.array(balance.channel_scale(summed, key_squares, layout))


def page_scale_mlx(
    page: mx.array, mean: mx.array, query_squares: mx.array | None, n_skipped: int, layout: RopeLayout
) -> mx.array:
    """`page_scale_numpy` in MLX operations, lazily: sums in float32, so that a scale may differ in its last bits. The
    same rows and queries are left out. Only operations that MLX has compiled: fusing them takes it half a minute."""
    n_heads, n_rows, head_dim = page.shape
    if query_squares is None or query_squares.shape[1] <= n_skipped or n_rows <= n_skipped:
        return mx.ones((n_heads, head_dim))
    rows = page[:, n_skipped:].astype(mx.float32)
    centred = rows - mean.astype(mx.float32)[:, None]
    keys = mx.where(_counted(rows), centred * centred, 0.0).sum(axis=1)
    queries = query_squares[:, n_skipped:]
    largest = queries.max(axis=2, keepdims=True)
    known = (largest > 0) & (largest < math.inf)
    last = mx.maximum(known.sum(axis=1, keepdims=True) - 1, 0) // 2
    in_order = mx.sort(mx.where(known, largest, math.inf), axis=1)
    is_middle = mx.arange(in_order.shape[1])[:, None] == last
    middle = mx.where(is_middle, in_order, 0.0).sum(axis=1, keepdims=True)
    counts = known & (largest <= balance.FAR_OUTSIDE**2 * middle)
    q, k = _tied(mx.where(counts, queries, 0.0).sum(axis=1), layout), _tied(keys, layout)
    q_mean, k_mean = q.mean(axis=-1, keepdims=True), k.mean(axis=-1, keepdims=True)
    known = (q_mean > 0) & (k_mean > 0)
    above, below = (mx.where(known, x + balance.FLOOR * m, 1.0) for x, m in ((q, q_mean), (k, k_mean)))
    logarithm = (mx.log(above) - mx.log(below)) / 4
    return mx.exp(logarithm - logarithm.mean(axis=-1, keepdims=True))


def _tied(x: mx.array, layout: RopeLayout) -> mx.array:
    """`RopeLayout.tie` of [n_kv_heads, head_dim]."""
    pairs = x[:, : layout.dims].reshape(x.shape[0], *((-1, 2) if layout.traditional else (2, -1)))
    means = pairs.mean(axis=2 if layout.traditional else 1, keepdims=True)
    tied = mx.broadcast_to(means, pairs.shape).reshape(x.shape[0], layout.dims)
    return mx.concatenate([tied, x[:, layout.dims :]], axis=1)


def balance_rows(rows: mx.array, mean: mx.array, scale: mx.array | None) -> mx.array:
    """`balance.balance_rows`, lazily."""
    centred = rows.astype(mx.float32) - mean.astype(mx.float32)[:, None]
    return centred if scale is None else centred * scale[:, None]


def unbalance_pages(rows: mx.array, means: mx.array, scale: mx.array | None) -> mx.array:
    """`balance.unbalance_rows`, lazily: rows [n_kv_heads, pages * tokens, head_dim], means [pages, n_kv_heads, ...]."""
    pages = rows.reshape(rows.shape[0], means.shape[0], -1, rows.shape[2])
    if scale is not None:
        pages = pages / scale[:, None, None]
    return (pages + means.astype(mx.float32).swapaxes(0, 1)[:, :, None]).reshape(rows.shape)


def checked_scale(scale: Any, where: str) -> mx.array:
    """A given channel scale as f32 [n_kv_heads, head_dim]. RequestError unless it is floats of bounded size."""
    values = np.asarray(scale) if isinstance(scale, (mx.array, np.ndarray)) and scale.dtype != mx.bfloat16 else None
    if values is None or values.ndim != 2 or not np.issubdtype(values.dtype, np.floating):
        found = f"{scale.dtype} {scale.shape}" if hasattr(scale, "shape") else type(scale).__name__
        raise RequestError(f"{where}: expected a channel scale float32 [n_kv_heads, head_dim], found {found}")
    low, high = balance.SCALE_LIMITS
    if not ((low <= values) & (values <= high)).all():
        raise RequestError(f"{where}: expected a channel scale of values from {low:g} to {high:g}, found others")
    return mx.array(values.astype(np.float32))


@dataclass
class ChannelScale:
    """The scale `a` of one layer, or what is known of it until page 0 is full.

    value: f32 [n_kv_heads, head_dim] once fixed. query_squares: f32 [n_kv_heads, tokens, head_dim], for each token of
    page 0 the sum over the group's query heads; zeros where nobody attended.
    """

    layout: RopeLayout
    value: mx.array | None = None
    query_squares: mx.array | None = None

    @property
    def is_open(self) -> bool:
        """Whether page 0 is still to decide it."""
        return self.value is None

    def copy(self) -> ChannelScale:
        return ChannelScale(self.layout, self.value, self.query_squares)

    def observe(self, q: mx.array, offset: int, n_kv_heads: int) -> None:
        """Count queries [n_heads, rows, head_dim] at positions from `offset` on."""
        if not self.is_open or offset >= PAGE_TOKENS or not q.shape[1]:
            return
        rows = q[:, : PAGE_TOKENS - offset].astype(mx.float32)
        squares = (rows * rows).reshape(n_kv_heads, -1, *rows.shape[1:]).sum(axis=1)
        parts = [] if self.query_squares is None else [self.query_squares[:, :offset]]
        known = parts[0].shape[1] if parts else 0
        if known < offset:
            parts.append(mx.zeros((squares.shape[0], offset - known, squares.shape[2])))
        self.query_squares = mx.concatenate([*parts, squares], axis=1)

    def forget(self, length: int) -> None:
        """The tokens from `length` on have been removed."""
        if self.query_squares is not None:
            self.query_squares = self.query_squares[:, :length] if length else None

    def fix(self, value: mx.array) -> None:
        """Page 0 and the queries counted have decided."""
        self.value, self.query_squares = value, None
