"""Attention, decoding and encoding by the GPU kernels: the reading of a GPU.

Steps of a few rows are answered by decode attention straight from blocks. Longer ones decode the pages before them for
some KV heads at a time, within a bounded workspace, and leave the rest to MLX's own attention, as float types do
always. What kernels do not read (types or head sizes) is left to MLX operations, whose fast twin this is.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx

from tqgguf.formats.codec import Codec
from tqgguf.runtime.kernels.decode_attention import attend_blocks
from tqgguf.runtime.kernels.launch import Launcher
from tqgguf.runtime.kernels.pages import decode_rows, encode_pages
from tqgguf.runtime.kernels.types import is_supported
from tqgguf.runtime.kv_sides import PAGE, SideView, cuts, prefix_length
from tqgguf.runtime.readings import MlxReading, Reads

MOST_ROWS = 8
"""Rows of a step up to which blocks are read by decode attention; longer steps decode them first
(benchmarks/LOG.md)."""

WORKSPACE_BYTES = 1 << 30
"""Bytes that decoded keys and values of a long step may take at a time; at least one KV head is decoded whole."""

_QUERY_TYPES = (mx.float16, mx.bfloat16, mx.float32)


class KernelReading(MlxReading):
    """MLX's reading with kernels in the places that count. most_rows, workspace_bytes: instead of the constants
    above."""

    def __init__(self, launcher: Launcher, most_rows: int = MOST_ROWS, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self.launcher, self.most_rows, self.workspace_bytes = launcher, most_rows, workspace_bytes

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        if not _can_encode(codec, rows):
            return super().encode(codec, rows)
        codes, scales, _ = encode_pages(self.launcher, codec, rows)
        return codes[0], scales[0]

    def encode_pages(
        self, codec: Codec, rows: mx.array, *, n_skipped: int, centred: bool, scale: mx.array | None
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        if not _can_encode(codec, rows):
            return super().encode_pages(codec, rows, n_skipped=n_skipped, centred=centred, scale=scale)
        return encode_pages(self.launcher, codec, rows, n_skipped=n_skipped, centred=centred, channel_scale=scale)

    def decode(self, side: SideView, first: int, last: int) -> Any:
        if not is_supported(side.codec):
            return super().decode(side, first, last)
        end = last * PAGE
        return decode_rows(self.launcher, side, first * PAGE, end, coded_end=end, dtype=mx.float32, unrotated=False)

    def answer(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        *,
        offset: int,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        reads: Reads | None,
        own_from_blocks: bool,
    ) -> mx.array | None:
        """`attention.attend`, or None for a step that the kernels do not take."""
        n_rows = q.shape[2]
        all_float = k.codec.is_float and v.codec.is_float
        kernels = is_supported(k.codec) and is_supported(v.codec)
        if own_from_blocks or q.dtype not in _QUERY_TYPES or not (kernels or all_float):
            return None
        pages = [(lo, hi) for lo, hi in pairwise(cuts(offset, offset + n_rows))]
        if all_float:
            out = _attend_rows(q, k, v, offset, scale, window, sinks)
        elif n_rows <= self.most_rows:
            parts = [
                attend_blocks(
                    self.launcher,
                    q[0, :, lo - offset : hi - offset],
                    k,
                    v,
                    offset=lo,
                    scale=scale,
                    window=window,
                    sinks=sinks,
                )
                for lo, hi in pages
            ]
            out = (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1))[None]
        else:
            out = self._attend_decoded(q, k, v, pages, scale, window, sinks)
        if reads is not None:
            for lo, hi in pages:
                reads.count_page(lo, hi, k.codec, v.codec, window, prefix_length(k, v))
        return out

    def _attend_decoded(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        pages: list[tuple[int, int]],
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """A long step: some KV heads at a time, their rows decoded once, own pages put in f16 for their turn."""
        n_heads, n_kv_heads = q.shape[1], k.rows.shape[0]
        group = n_heads // n_kv_heads
        offset, end = pages[0][0], pages[-1][1]
        start = _start(k, v, offset, window)
        dtype = mx.bfloat16 if q.dtype == mx.bfloat16 else mx.float16
        per_head = 2 * (end - start) * (k.codec.head_dim + v.codec.head_dim)
        at_once = max(1, min(n_kv_heads, self.workspace_bytes // per_head))
        outs = []
        for first in range(0, n_kv_heads, at_once):
            heads = first, min(first + at_once, n_kv_heads)
            some = slice(first * group, heads[1] * group)
            sides = [_Decoded(self.launcher, side, heads, start, offset, end, dtype) for side in (k, v)]
            parts = []
            for lo, hi in pages:
                keys, values = (side.seen_by(lo, hi) for side in sides)
                parts.append(
                    _attention(
                        q[:, some, lo - offset : hi - offset].astype(dtype),
                        keys,
                        values,
                        (start, lo),
                        scale,
                        window,
                        None if sinks is None else sinks[some],
                    )
                )
            outs.append(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2))
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)
        return out.astype(q.dtype)


class _Decoded:
    """Rows of some KV heads of a side from `start` on, as the step's pages see them in turn.

    A row sees earlier pages as blocks and its own in f16: each page of the step is f16 rows first, and decoded ones
    once the next page's rows have their turn.
    """

    def __init__(
        self,
        launcher: Launcher,
        side: SideView,
        heads: tuple[int, int],
        start: int,
        offset: int,
        end: int,
        dtype: mx.Dtype,
    ) -> None:
        self._launcher, self._side, self._heads, self._dtype = launcher, side, heads, dtype
        self._start, self._page = start, offset // PAGE
        if side.codec.is_float:
            self._rows = side.rows[slice(*heads), start - side.rows_start :].astype(dtype)
        else:
            coded_end = self._page * PAGE
            self._rows = decode_rows(launcher, side, start, end, coded_end=coded_end, dtype=dtype, heads=heads)

    def seen_by(self, lo: int, hi: int) -> mx.array:
        """Rows [1, heads, tokens, head_dim] from the start up to position hi - 1, for queries lo .. hi - 1 of one
        page."""
        page = lo // PAGE
        if page != self._page and not self._side.codec.is_float:
            first, last = self._page * PAGE, page * PAGE
            coded = decode_rows(
                self._launcher, self._side, first, last, coded_end=last, dtype=self._dtype, heads=self._heads
            )
            self._rows[:, first - self._start : last - self._start] = coded
        self._page = page
        return self._rows[None, :, : hi - self._start]


def _attend_rows(
    q: mx.array, k: SideView, v: SideView, offset: int, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array:
    """Float types on both sides: MLX's own attention over their rows."""
    start = _start(k, v, offset, window)
    dtype = k.rows.dtype if k.rows.dtype == v.rows.dtype else mx.float32
    keys, values = (side.rows[None, :, start - side.rows_start :].astype(dtype) for side in (k, v))
    out = _attention(q.astype(dtype), keys, values, (start, offset), scale, window, sinks)
    return out.astype(q.dtype)


def _attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: tuple[int, int],
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """MLX's attention. positions: of the first key and of the first query; the last key is the last query's own."""
    first_key, first_query = positions
    n_rows = q.shape[2]
    mask: Any = "causal" if n_rows > 1 else None
    if window is not None and first_query + n_rows - first_key > window:
        row = mx.arange(first_query, first_query + n_rows)[:, None]
        key = mx.arange(first_key, first_query + n_rows)
        mask = (key <= row) & (key > row - window)
    return mx.fast.scaled_dot_product_attention(
        q, keys, values, scale=scale, mask=mask, sinks=None if sinks is None else sinks.astype(q.dtype)
    )


def _start(k: SideView, v: SideView, offset: int, window: int | None) -> int:
    """The first position that the step reads, at a page's edge."""
    held = max(k.first_page, v.first_page)
    return PAGE * (held if window is None else max(held, max(0, offset - window + 1) // PAGE))


def _can_encode(codec: Codec, rows: mx.array) -> bool:
    return not codec.is_float and is_supported(codec) and rows.dtype in (mx.float16, mx.float32)
