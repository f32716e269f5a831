"""Balance of K: what is subtracted from a page's keys, and what they are scaled by, before they are encoded.

Stored is a * (k - mean). Both are undone exactly: the query is divided by `a`, and query . mean is added to the page's
scores. Means follow the keys as RoPE turns them; `a` gives the channels that queries use most the smallest errors. A
few keys or queries far outside all others decide neither (`counted_rows`, `counted_queries`). This is arithmetic on
arrays; which pages and queries it is fed with is decided by caches and by calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FLOOR = 1e-4
"""Added to both statistics, as a share of their mean over a head's channels, so that a channel which queries never use,
or keys never vary in, gets a bounded scale. From the experiments on balance."""


SCALE_LIMITS = (2.0**-12, 2.0**12)
"""What a channel scale can be: `FLOOR` bounds the ratio of statistics, far inside these."""

FAR_OUTSIDE = 16.0
"""A row that lies this many times further out than the middle row of its page is left out of mean and channel scale.
Measured on SmolLM2: in prose, code and tables of four languages no key lies further out than 6.7 times, and no query
than 2.4 times. A power of two: the product is exact."""


@dataclass(frozen=True)
class RopeLayout:
    """Which channels of a key RoPE turns together: of the first `dims`, neighbours (`traditional`) or halves."""

    dims: int
    traditional: bool = False

    def pairs(self) -> NDArray[np.intp]:
        """[2, dims / 2]: the two channels of each pair."""
        channels = np.arange(self.dims)
        return channels.reshape(-1, 2).T if self.traditional else channels.reshape(2, -1)

    def tie(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """x [..., head_dim] with the mean of its pair in both channels; others, which do not rotate, as they are."""
        tied, pairs = x.copy(), self.pairs()
        tied[..., pairs] = x[..., pairs].mean(axis=-2, keepdims=True)
        return tied


NOT_ROTATED = RopeLayout(0)


def counted_rows(rows: NDArray[np.float16], n_skipped: int = 0) -> NDArray[np.bool_]:
    """Which of a page's rows [n_kv_heads, tokens, head_dim] from `n_skipped` on count: [n_kv_heads, those tokens].

    A row's reach is the largest |k - middle| over its channels, with the lower median of each channel as the middle.
    Rows whose reach is above FAR_OUTSIDE times the lower median of all reaches do not count, nor those that are not
    finite. No result depends on the order of operations, so that every backend leaves out the same rows.
    """
    return _counted(np.asarray(rows[:, n_skipped:], np.float32))


def _counted(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):  # values that are not finite are refused when the page is encoded
        reach = np.abs(values - _lower_median(values)).max(axis=2, initial=0.0)
        limit = np.float32(FAR_OUTSIDE) * _lower_median(reach)
        return np.asarray((reach <= limit) & (reach < np.inf))


def _lower_median(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of [n_kv_heads, tokens, ...] over the tokens, which stay an axis of length 1, or 0 where there are none."""
    middle = (values.shape[1] - 1) // 2
    return np.partition(values, middle, axis=1)[:, middle : middle + 1] if values.shape[1] else values


def page_mean(rows: NDArray[np.float16], n_skipped: int = 0) -> NDArray[np.float16]:
    """The mean of a page's rows [n_kv_heads, tokens, head_dim] from row `n_skipped` on: f16 [n_kv_heads, head_dim].

    A float32 sum of the rows that count in token order, times float32(1 / their number). Zero where no row is left.
    """
    counted = np.ascontiguousarray(rows[:, n_skipped:], np.float32)
    counts = _counted(counted)
    if not counts.all():
        counted = np.where(counts[:, :, None], counted, np.float32(0))
    # numpy adds whole rows one after the other here, because the axis is not the innermost: no pairwise sums
    with np.errstate(invalid="ignore"):  # as in `_counted`
        total = np.add.reduce(counted, axis=1)
    shares = (1 / np.maximum(counts.sum(axis=1), 1)).astype(np.float32)
    return (total * shares[:, None]).astype(np.float16)


def balance_rows(
    rows: NDArray[np.float16], mean: NDArray[np.float16], scale: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """scale * (rows - mean), float32 [n_kv_heads, tokens, head_dim]; mean and scale are [n_kv_heads, head_dim]."""
    with np.errstate(invalid="ignore"):  # as in `_counted`
        centred = rows.astype(np.float32) - mean.astype(np.float32)[:, None]
    return centred if scale is None else centred * scale[:, None]


def unbalance_rows(
    rows: NDArray[np.float32], mean: NDArray[np.float16], scale: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """What `balance_rows` was given, from what it gave (decoded): rows / scale + mean."""
    centred = rows if scale is None else rows / scale[:, None]
    return centred + mean.astype(np.float32)[:, None]


def centred_squares(rows: NDArray[np.float16], mean: NDArray[np.float16], n_skipped: int = 0) -> NDArray[np.float64]:
    """A page's share of `channel_scale`'s key_squares: from its mean, and its rows from `n_skipped` on that count."""
    squares = balance_rows(rows, mean, None)[:, n_skipped:].astype(np.float64) ** 2
    counts = counted_rows(rows, n_skipped)
    return (squares if counts.all() else np.where(counts[:, :, None], squares, 0.0)).sum(axis=1)


def counted_queries(squares: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Which tokens' queries count for the channel scale, bool [n_kv_heads, tokens]: of their squares, as
    `channel_scale` sums them, [n_kv_heads, tokens, head_dim].

    Not those whose largest square is above FAR_OUTSIDE ** 2 times the lower median of all tokens that have queries,
    nor those that are not finite.
    """
    largest = squares.max(axis=2, initial=0.0)
    finite = np.isfinite(largest)
    counts = np.zeros(largest.shape, np.bool_)
    for head, (of_head, known) in enumerate(zip(largest, finite & (largest > 0), strict=True)):
        if known.any():
            counts[head] = known & (of_head <= FAR_OUTSIDE**2 * np.sort(of_head[known])[(known.sum() - 1) // 2])
    return counts


def summed_queries(squares: NDArray[np.floating]) -> NDArray[np.float64]:
    """`channel_scale`'s query_squares: of tokens' squares [n_kv_heads, tokens, head_dim], those that count."""
    return np.where(counted_queries(squares)[:, :, None], squares, 0.0).sum(axis=1, dtype=np.float64)


def channel_scale(
    query_squares: NDArray[np.floating], key_squares: NDArray[np.floating], layout: RopeLayout
) -> NDArray[np.float32]:
    """The scale `a` float32 [n_kv_heads, head_dim] that balances errors of keys against the use queries make of them.

    query_squares: sums of squares of all queries of a KV head's group. key_squares: sums of squares of its keys after
    their page's mean was subtracted. Only their ratios between channels count: a = (queries / keys) ** (1/4), one value
    for each pair of `layout`, with a geometric mean of 1 in every head. 1 in heads where either is zero.
    """
    q, k = (layout.tie(np.asarray(x, np.float64)) for x in (query_squares, key_squares))
    q_mean, k_mean = (x.mean(axis=-1, keepdims=True) for x in (q, k))
    known = (q_mean > 0) & (k_mean > 0)
    ratio = np.where(known, q + FLOOR * q_mean, 1.0) / np.where(known, k + FLOOR * k_mean, 1.0)
    scale = ratio**0.25
    return (scale / np.exp(np.log(scale).mean(axis=-1, keepdims=True))).astype(np.float32)
