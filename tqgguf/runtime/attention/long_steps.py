"""Long steps on a GPU: pages are decoded for some KV heads at a time, and MLX's own attention reads them.

A row sees the pages before its own as blocks, and its own page in f16. Where rows lie in several pages, keys are taken
in parts that whole pages of rows see alike, and the parts' answers are joined; where MLX has no attention that gives
its log-sum-exp, pages are there in both forms, and a mask says which row sees which.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import mlx.core as mx

from tqgguf.runtime.attention.partial import MOST_HEAD_DIM, PartialAttention, best_partial, on_its_stream
from tqgguf.runtime.kernels.join_parts import MOST_LEVELS, Part, StepParts, join_parts
from tqgguf.runtime.kernels.launch import Launcher
from tqgguf.runtime.kernels.pages import decode_rows
from tqgguf.runtime.kv.pages import PAGE, Query, SideView, cuts, first_read_page
from tqgguf.runtime.thread_cache import lru_cache_in_thread

WORKSPACE_BYTES = 1 << 30
"""Bytes that decoded keys and values of a long step may take at a time; at least one KV head is decoded whole. Room for
130,000 tokens of 8 KV heads of 128, so that it hardly ever costs a second pass."""

MASK_BYTES = 1 << 28
"""Bytes of a mask, as wide as the keys, for the query rows of a long step that are taken together; all of a page's
rows are. As much as a mask of 2,048 rows over 64k keys."""

PIECE = 64 * PAGE
"""Keys before a step are taken in pieces of so many, and what is left: few rows then still fill a GPU, and cuDNN, which
prepares itself for every new length, meets few lengths (benchmarks/LOG.md)."""

LAYERS_IN_FLIGHT = 2
"""Layers of a long step that may be there at once, with their decoded pages: one that the GPU works on, and one that
waits for it."""

_LEAST_BYTES_IN_FLIGHT = 1 << 26  # of a layer, below which layers are not waited for
_OF_THE_QUERIES = 8  # times their bytes are what the rest of a layer makes, roughly
_IN_F16 = 2  # bytes


class LongSteps:
    """Attention of steps that are too long for decode attention. partial: None for what MLX has here, if anything."""

    def __init__(
        self, launcher: Launcher, partial: PartialAttention | None, workspace_bytes: int, mask_bytes: int
    ) -> None:
        self.launcher, self._partial = launcher, partial
        self.workspace_bytes, self.mask_bytes = workspace_bytes, mask_bytes

    def attend(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        *,
        offset: int,
        query: Query,
    ) -> mx.array:
        """`Backend.attend` of rows at positions from offset on: as many of them at a time as parts are joined for, or
        as the mask has room for, and as many KV heads as the workspace holds."""
        n_kv_heads, end = k.rows.shape[0], offset + q.shape[2]
        group = q.shape[1] // n_kv_heads
        start = PAGE * first_read_page(k, v, offset, query.window)
        by_parts = self._takes_parts(k, v, end - start, query.window)
        rows_at_once = PAGE << MOST_LEVELS if by_parts else self._rows_of_a_mask(2 * end - start)
        _wait_for_others(q, n_kv_heads * _bytes_of_a_head(k, v, start, offset, end) + _OF_THE_QUERIES * q.nbytes)
        parts, first_page = [], offset // PAGE * PAGE
        for after, before in pairwise(cuts(offset - first_page, end - first_page, rows_at_once)):
            lo, hi = first_page + after, first_page + before
            start = PAGE * first_read_page(k, v, lo, query.window)
            in_parts = by_parts and hi - lo // PAGE * PAGE > PAGE
            attend_heads = self._attend_in_parts if in_parts else self._attend_masked
            at_once = max(1, min(n_kv_heads, self.workspace_bytes // _bytes_of_a_head(k, v, start, lo, hi)))
            outs = []
            for first in range(0, n_kv_heads, at_once):
                heads = first, min(first + at_once, n_kv_heads)
                some = slice(first * group, heads[1] * group)
                rows = q[:, some, lo - offset : hi - offset]
                with on_its_stream() if in_parts else nullcontext():
                    outs.append(attend_heads(rows, k, v, heads, (start, lo), query.of_heads(some)))
            parts.append(outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    @property
    def partial(self) -> PartialAttention | None:
        return self._partial or best_partial()

    def _takes_parts(self, k: SideView, v: SideView, n_keys: int, window: int | None) -> bool:
        """Whether all rows see all keys before their own, and attention gives what joins its parts."""
        all_seen = window is None or n_keys <= window
        return all_seen and max(k.codec.head_dim, v.codec.head_dim) <= MOST_HEAD_DIM and self.partial is not None

    def _rows_of_a_mask(self, n_keys: int) -> int:
        return max(1, self.mask_bytes // (_IN_F16 * n_keys * PAGE)) * PAGE

    def _attend_in_parts(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        heads: tuple[int, int],
        positions: tuple[int, int],
        query: Query,
    ) -> mx.array:
        """Rows of several pages: each page over itself, over the step's pages before it, and over those before the
        step.

        Of the step's pages, the p-th sees p as blocks: for each bit i that p has, a run of 2 ** i pages, which is the
        run before the one that p lies in. So every other run of 2 ** i pages sees the one before it, all at once.
        """
        start, lo = positions
        hi = lo + q.shape[2]
        own_start, n_pages = lo // PAGE * PAGE, -(-hi // PAGE) - lo // PAGE
        own_end, coded_end = own_start + n_pages * PAGE, own_start + (n_pages - 1) * PAGE
        n_levels = (n_pages - 1).bit_length()
        out_type, dtype = q.dtype, _kernel_dtype(q)
        q = mx.contiguous(_padded(q.astype(dtype), lo - own_start, own_end - hi))

        partial = self.partial
        assert partial is not None

        def attended(rows: mx.array, keys: list[mx.array], causal: bool = False) -> Part:
            return partial(rows, *keys, scale=query.scale, causal=causal)

        near = [
            self._both_forms(side, heads, own_start, coded_end, (own_start, hi), dtype, own_end - hi) for side in (k, v)
        ]
        own = attended(_runs(q, n_pages), [_key_runs(rows[coded_end - own_start :], n_pages) for rows in near], True)
        levels, wide = [], _padded(q, 0, (PAGE << n_levels) - q.shape[2])
        for level in range(n_levels):
            n_runs = 1 << (n_levels - level)
            keys = [_key_runs(rows[: PAGE << n_levels], n_runs)[0::2] for rows in near]
            levels.append(attended(_runs(wide, n_runs)[1::2], keys))
        pieces = rest = None
        if start < own_start:
            n_pieces = (own_start - start) // PIECE
            far = [self._both_forms(side, heads, start, own_start, (own_start, own_start), dtype) for side in (k, v)]
            if n_pieces:
                copies = q if n_pieces == 1 else mx.concatenate([q] * n_pieces, axis=0)
                pieces = attended(copies, [_key_runs(rows[: n_pieces * PIECE], n_pieces) for rows in far])
            if (own_start - start) % PIECE:
                rest = attended(q, [_key_runs(rows[n_pieces * PIECE :], 1) for rows in far])
        return join_parts(
            self.launcher,
            StepParts(own, pieces, rest, levels),
            (lo - own_start, hi - own_start),
            None if query.sinks is None else query.sinks.astype(mx.float32),
            out_type,
        )

    def _attend_masked(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        heads: tuple[int, int],
        positions: tuple[int, int],
        query: Query,
    ) -> mx.array:
        """Rows by one call: pages up to the last row's own as blocks, then the rows' own pages in f16. A mask as an
        array only where rows lie in several pages, or where the window hides keys."""
        start, lo = positions
        hi = lo + q.shape[2]
        coded_end, own_start = (hi - 1) // PAGE * PAGE, lo // PAGE * PAGE
        dtype = _kernel_dtype(q)
        keys, values = (
            _key_runs(self._both_forms(side, heads, start, coded_end, (own_start, hi), dtype), 1) for side in (k, v)
        )
        if coded_end == own_start:
            mask = causal_mask(start, lo, hi, query.window)
        else:
            mask = _own_page_mask(start, lo, hi, query.window, dtype)
        sinks = None if query.sinks is None else query.sinks.astype(dtype)
        out = mx.fast.scaled_dot_product_attention(
            q.astype(dtype), keys, values, scale=query.scale, mask=mask, sinks=sinks
        )
        return out.astype(q.dtype)

    def _both_forms(
        self,
        side: SideView,
        heads: tuple[int, int],
        start: int,
        coded_end: int,
        own: tuple[int, int],
        dtype: mx.Dtype,
        n_zeros: int = 0,
    ) -> mx.array:
        """[tokens, heads, head_dim]: positions start .. coded_end - 1 from blocks, then those of `own` in f16, then
        zeros.

        Tokens come first, so that a step's arrays have the same strides however many keys there are.
        """
        if not side.codec.is_float:
            return decode_rows(
                self.launcher,
                side,
                start,
                coded_end,
                own=own if own[0] < own[1] else None,
                dtype=dtype,
                heads=heads,
                tokens_first=True,
                n_zeros=n_zeros,
            )
        of_heads = side.rows[slice(*heads)].swapaxes(0, 1).astype(dtype)
        parts = [of_heads[lo - side.rows_start : hi - side.rows_start] for lo, hi in ((start, coded_end), own)]
        if n_zeros:
            parts.append(mx.zeros((n_zeros, *of_heads.shape[1:]), dtype=dtype))
        return mx.concatenate(parts, axis=0)


_in_flight: deque[mx.array] = deque()  # queries of the last layers, of whatever model


def _wait_for_others(q: mx.array, n_bytes: int) -> None:
    """MLX's host runs ahead of the GPU by most layers of a step, and what it hands over has its memory already: so
    what this layer's queries need is handed over now, and not before the layers before have been worked off."""
    if n_bytes < _LEAST_BYTES_IN_FLIGHT:
        return
    while len(_in_flight) >= LAYERS_IN_FLIGHT:
        mx.eval(_in_flight.popleft())
    try:
        mx.async_eval(q)
    except ValueError:  # while MLX traces the step, there is nothing to evaluate
        return
    _in_flight.append(q)


def _bytes_of_a_head(k: SideView, v: SideView, start: int, lo: int, hi: int) -> int:
    """Of decoded keys and values for rows lo .. hi - 1, which see positions from start on."""
    return _IN_F16 * (2 * hi - lo - start) * (k.codec.head_dim + v.codec.head_dim)


def _kernel_dtype(q: mx.array) -> mx.Dtype:
    return mx.bfloat16 if q.dtype == mx.bfloat16 else mx.float16


def _padded(q: mx.array, before: int, after: int) -> mx.array:
    return mx.pad(q, [(0, 0), (0, 0), (before, after), (0, 0)]) if before or after else q


def _runs(q: mx.array, n: int) -> mx.array:
    """Rows [1, heads, rows, head_dim] as n runs [n, heads, rows / n, head_dim]."""
    return q.reshape(q.shape[1], n, -1, q.shape[3]).swapaxes(0, 1)  # q[0] would be a copy


def _key_runs(rows: mx.array, n: int) -> mx.array:
    """Rows [tokens, heads, head_dim] as n runs [n, heads, tokens / n, head_dim]."""
    return rows.reshape(n, -1, *rows.shape[1:]).swapaxes(1, 2)


@lru_cache_in_thread(2)  # of layers with a window and without; each takes up to MASK_BYTES
def _own_page_mask(start: int, lo: int, hi: int, window: int | None, dtype: mx.Dtype) -> mx.array:
    """What is added to the scores of rows lo .. hi - 1 (0, or minus infinity), for keys as `_both_forms` has them.

    [rows, keys]; the layers of a step share it.
    """
    coded_end, own_start = (hi - 1) // PAGE * PAGE, lo // PAGE * PAGE
    row = mx.arange(lo, hi)[:, None]
    own_page = row // PAGE * PAGE
    coded, own = mx.arange(start, coded_end), mx.arange(own_start, hi)
    seen = mx.concatenate([coded < own_page, (own >= own_page) & (own <= row)], axis=1)
    if window is not None:
        seen &= mx.concatenate([coded, own]) > row - window
    return mx.where(seen, mx.array(0, dtype=dtype), mx.array(-mx.inf, dtype=dtype))


def causal_mask(first_key: int, lo: int, hi: int, window: int | None) -> Any:
    """MLX's mask of rows lo .. hi - 1 over the keys from first_key up to the last row's own."""
    if window is not None and hi - first_key > window:
        row, key = mx.arange(lo, hi)[:, None], mx.arange(first_key, hi)
        return (key <= row) & (key > row - window)
    return "causal" if hi - lo > 1 else None
