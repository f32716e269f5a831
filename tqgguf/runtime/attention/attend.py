"""Attention straight from compressed blocks: one algorithm, computed by numpy or by MLX (`arithmetic`).

A query at position p reads the pages below p // PAGE as blocks and its own page in f16 (float types are the same
everywhere). The query is rotated once; blocks are decoded into the rotated domain, a few pages at a time and once for
all query heads of a group and all rows; values accumulate there, and the output is rotated back once. Softmax is
computed online, so the workspace is one tile.

Knows nothing of mlx-lm, of how a side is stored beyond its `SideView`, or of masks other than causal with a window.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from tqgguf.runtime.attention.arithmetic import Arithmetic
from tqgguf.runtime.attention.reads import Reads
from tqgguf.runtime.kv.block_ops import as_float
from tqgguf.runtime.kv.pages import PAGE, Query, SideView, cuts, prefix_length

TILE_PAGES = 8  # pages decoded at a time: 1,024 keys, large enough for the matmul, small enough for the caches
FLOAT_GROUP_ROWS = 256  # query rows handled together where no page boundary cuts them


def attend_tiles(
    arithmetic: Arithmetic,
    q: mx.array,
    k: SideView,
    v: SideView,
    *,
    offset: int,
    query: Query,
    reads: Reads | None,
    own_from_blocks: bool,
) -> mx.array:
    """`Backend.attend`."""
    _, n_heads, n_rows, _ = q.shape
    n_kv_heads = k.rows.shape[0]
    own = _Rows(arithmetic, k, v)
    queries = arithmetic.load(q[0])[0].reshape(n_kv_heads, n_heads // n_kv_heads, n_rows, -1)
    plain, coded = queries * query.scale, _coded_query(arithmetic, k, queries) * query.scale
    logits = None if query.sinks is None else arithmetic.load(query.sinks)[0].reshape(n_kv_heads, -1, 1, 1)

    end = offset + n_rows
    paged = not (k.codec.is_float and v.codec.is_float)
    step = PAGE if paged else FLOAT_GROUP_ROWS
    groups = [
        _Group(
            arithmetic,
            plain[:, :, a - offset : b - offset],
            coded[:, :, a - offset : b - offset],
            a,
            query.window,
            logits,
        )
        for a, b in pairwise(cuts(offset, end, step))
    ]
    if paged:
        n_encoded = min(k.end_page, v.end_page) if own_from_blocks else 0
        _attend_pages(groups, own, arithmetic, k, v, n_encoded)
    else:
        _attend_rows(groups, own, end)
    if reads is not None:
        for group in groups:
            reads.count(group.n_plain, False, False)
            reads.count(group.n_coded, not k.codec.is_float, not v.codec.is_float)
    parts = [group.result(v) for group in groups]
    out = parts[0] if len(parts) == 1 else arithmetic.xp.concatenate(parts, axis=2)
    return as_float(mx.array(out).reshape(1, n_heads, n_rows, -1), q.dtype)


def _coded_query(arithmetic: Arithmetic, k: SideView, queries: Any) -> Any:
    if k.channel_scale is not None:
        queries = queries / arithmetic.load(k.channel_scale)[0][:, None, None]
    return arithmetic.rotate(k, queries)


def _attend_pages(
    groups: list[_Group], own: _Rows, arithmetic: Arithmetic, k: SideView, v: SideView, n_encoded: int
) -> None:
    """Own pages first, then earlier blocks, then the exact prefix. Own pages before n_encoded are read as blocks."""
    n_prefix = prefix_length(k, v)

    def see_blocks(lo: int, hi: int, seen_by: list[_Group]) -> None:
        skip = n_prefix if lo == 0 else 0
        if not seen_by or skip == (hi - lo) * PAGE:  # an exact prefix of a whole page leaves nothing of page 0 to read
            return
        keys, values = (own.coded(side, lo, hi)[:, skip:] for side in (k, v))
        for group in seen_by:
            group.see(
                keys, values, lo * PAGE + skip, coded=True, offsets=_page_offsets(arithmetic, k, group, lo, hi, skip)
            )

    for group in groups:
        page = group.first // PAGE
        if page < n_encoded:
            see_blocks(page, page + 1, [group])
        else:
            group.see(*own.read(page * PAGE, group.end), page * PAGE, coded=False)
    first, last = groups[0].first // PAGE, groups[-1].first // PAGE
    start = max(k.first_page, v.first_page)
    # Pages that were full before this step in tiles, those that it filled one by one: later rows see them as blocks.
    edges = [*range(start, first, TILE_PAGES), *range(first, last + 1)]
    for lo, hi in pairwise(edges):
        see_blocks(lo, hi, [group for group in groups if hi * PAGE <= group.first and group.sees(hi * PAGE)])
    if n_prefix:
        for group in groups:
            if (group.first >= PAGE or n_encoded) and group.sees(n_prefix):
                group.see(*own.read_prefix(n_prefix), 0, coded=False)


def _attend_rows(groups: list[_Group], own: _Rows, end: int) -> None:
    tile = TILE_PAGES * PAGE
    start = own.k.rows_start
    for hi in range(end, start, -tile):
        lo = max(start, hi - tile)
        seen_by = [group for group in groups if lo < group.end and group.sees(hi)]
        if seen_by:
            keys, values = own.read(lo, hi)
            for group in seen_by:
                group.see(keys, values, lo, coded=False)


def _page_offsets(arithmetic: Arithmetic, k: SideView, group: _Group, first: int, last: int, skip: int) -> Any:
    """q . mean of each page, repeated over its tokens: [n_kv_heads, rows of the group, tokens]; None without means."""
    if k.page_means is None:
        return None
    lo, hi = first - k.first_page, last - k.first_page
    means = arithmetic.load(k.page_means[lo:hi].transpose(1, 2, 0))[0]
    return arithmetic.xp.repeat(arithmetic.matmul(group.plain, means), PAGE, axis=-1)[..., skip:]


class _Rows:
    """Readings by absolute position, loaded once per step."""

    def __init__(self, arithmetic: Arithmetic, k: SideView, v: SideView) -> None:
        self.k, self.v, self.arithmetic = k, v, arithmetic
        self._start = 0
        self._own: list[Any] | None = None
        if not (k.codec.is_float and v.codec.is_float):
            # only the pages that this step touches; a float side beside a block side is sliced like it
            self._start = max(k.rows_start, v.rows_start)
            self._own = arithmetic.load(*(side.rows[:, self._start - side.rows_start :] for side in (k, v)))

    def read(self, lo: int, hi: int) -> tuple[Any, Any]:
        """Rows lo .. hi - 1 of K and V in original axes."""
        if self._own is not None:
            keys, values = (rows[:, lo - self._start : hi - self._start] for rows in self._own)
        else:
            sides = (side.rows[:, lo - side.rows_start : hi - side.rows_start] for side in (self.k, self.v))
            keys, values = self.arithmetic.load(*sides)
        return keys, values

    def read_prefix(self, n: int) -> tuple[Any, Any]:
        """The exact prefix of K and V."""
        sides = (side.rows[:, :n] if side.prefix is None else side.prefix for side in (self.k, self.v))
        keys, values = self.arithmetic.load(*sides)
        return keys, values

    def coded(self, side: SideView, first: int, last: int) -> Any:
        """Pages first .. last - 1 of a side as attention reads them; a float side has its plain rows."""
        if side.codec.is_float:
            return self.arithmetic.load(side.rows[:, first * PAGE - side.rows_start : last * PAGE - side.rows_start])[0]
        return self.arithmetic.decode(side, first, last)


class _Group:
    """Neighbouring query rows that see the same pages, with their running softmax: maximum, sum, and values.

    plain/coded: queries [n_kv_heads, heads per KV head, rows, head_dim], scaled, in original axes and as blocks have
    them.
    """

    def __init__(
        self, arithmetic: Arithmetic, plain: Any, coded: Any, first: int, window: int | None, sinks: Any
    ) -> None:
        h, g, r, d = plain.shape
        self.arithmetic, self.first, self.end, self.window = arithmetic, first, first + r, window
        xp = arithmetic.xp
        self.shape = (h, g, r)
        self.plain, self.coded = (x.reshape(h, g * r, d) for x in (plain, coded))
        self.sum: Any = 0.0
        self.maximum: Any = None
        self.values: dict[bool, Any] = {}
        self.n_plain = self.n_coded = 0
        if sinks is not None:
            self.maximum = xp.broadcast_to(sinks, (h, g, r, 1)).reshape(h, g * r, 1)
            self.sum = xp.ones_like(self.maximum)

    def sees(self, end: int) -> bool:
        """Whether any key before position `end` is inside the window of the first row."""
        return self.window is None or end - 1 > self.first - self.window

    def see(self, keys: Any, values: Any, lo: int, *, coded: bool, offsets: Any = None) -> None:
        """Take keys and values [n_kv_heads, tokens, head_dim] at positions from `lo` into the softmax."""
        xp = self.arithmetic.xp
        scores = self.arithmetic.matmul(self.coded if coded else self.plain, keys.swapaxes(-1, -2))
        if offsets is not None:
            scores = scores + offsets
        hidden = self._hidden(lo, keys.shape[1])
        seen = keys.shape[1] * (self.end - self.first)
        if hidden is not None:
            seen -= int(hidden.sum())
            scores = xp.where(xp.array(np.tile(hidden, (self.shape[1], 1))), -xp.inf, scores)
        if coded:
            self.n_coded += seen
        else:
            self.n_plain += seen
        top = scores.max(axis=-1, keepdims=True)
        maximum = top if self.maximum is None else xp.maximum(self.maximum, top)
        safe = xp.where(maximum == -xp.inf, 0.0, maximum)  # a row that has seen nothing yet
        weights = xp.exp(scores - safe)
        if self.maximum is not None:
            decay = xp.exp(self.maximum - safe)
            self.sum = self.sum * decay
            self.values = {domain: x * decay for domain, x in self.values.items()}
        self.maximum = maximum
        self.sum = self.sum + weights.sum(axis=-1, keepdims=True)
        gained = self.arithmetic.matmul(weights, values)
        self.values[coded] = gained if coded not in self.values else self.values[coded] + gained

    def _hidden(self, lo: int, n: int) -> Any:
        """bool [rows, n], True where a key is after the row or before its window; None where all are seen."""
        if lo + n <= self.first + 1 and (self.window is None or lo > self.end - 1 - self.window):
            return None
        row, key = np.arange(self.first, self.end)[:, None], np.arange(lo, lo + n)
        hidden = key > row
        if self.window is not None:
            hidden |= key <= row - self.window
        return hidden

    def result(self, v: SideView) -> Any:
        """[n_kv_heads, heads per KV head, rows, head_dim of v]."""
        total = self.values.get(False, 0.0)
        if True in self.values:
            total = total + self.arithmetic.unrotate(v, self.values[True])
        return (total / self.sum).reshape(*self.shape, -1)
