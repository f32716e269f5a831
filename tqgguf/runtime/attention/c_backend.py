"""Attention, decoding and encoding by the C library: the backend of a CPU that has it.

Steps are answered in C straight from the planes; on the slow paths long ones go the way of `attend.attend`, with
pages decoded in C. What C does not do (some encoders, head sizes that 32 does not divide) is left to numpy, whose fast
twin this is. Knows nothing of how a cache stores its sides beyond their `SideView`.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqgguf.formats.blocks.codec import Codec
from tqgguf.runtime.attention.arithmetic import NumpyArithmetic
from tqgguf.runtime.attention.backend import NumpyBackend
from tqgguf.runtime.attention.reads import Reads
from tqgguf.runtime.kv import block_ops
from tqgguf.runtime.kv.pages import PAGE, Query, SidePages, SideView, cuts, prefix_length
from tqgguf.runtime.native.library import (
    KINDS,
    AttentionStep,
    Library,
    Plane,
    address,
    codec_struct,
    is_supported,
    page_plane,
    row_plane,
)

MOST_ROWS = {"portable": 2, "neon": 16}
"""Rows of a step up to which C is faster than matrix products over decoded pages. Measured: the other paths always are;
neon's figure is a careful guess."""

_QUERY_KINDS = {mx.float16: KINDS["f16"], mx.bfloat16: KINDS["bf16"], mx.float32: KINDS["f32"]}
_F16 = KINDS["f16"]


class CArithmetic(NumpyArithmetic):
    """numpy's, with pages decoded in C."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def decode(self, side: SidePages, first: int, last: int) -> Any:
        if not is_supported(side.codec):
            return super().decode(side, first, last)
        lo, hi = first - side.first_page, last - side.first_page
        return self._library.decode_pages(side.codec, np.asarray(side.codes)[lo:hi], np.asarray(side.scales)[lo:hi])


class CBackend(NumpyBackend):
    """numpy's way with C in the places that count. most_rows replaces the path's own limit of MOST_ROWS."""

    def __init__(self, library: Library, most_rows: int | None = None) -> None:
        self.library, self.most_rows, self.arithmetic = library, most_rows, CArithmetic(library)

    def encode(self, codec: Codec, rows: mx.array) -> tuple[mx.array, mx.array]:
        """A page's rows [n_kv_heads, tokens, head_dim] to planes; numpy refuses what cannot be encoded."""
        if rows.dtype not in (mx.float16, mx.float32):
            return block_ops.encode_page_numpy(codec, rows)
        values = np.asarray(rows)
        if values.strides[-1] != values.itemsize:
            values = np.ascontiguousarray(values)
        encoded = self.library.encode(codec, values)
        if encoded is None:
            return block_ops.encode_page_numpy(codec, rows)
        codes, scales = encoded
        return mx.array(codes), mx.array(scales)

    def attend(
        self,
        q: mx.array,
        k: SideView,
        v: SideView,
        *,
        offset: int,
        query: Query,
        reads: Reads | None = None,
        own_from_blocks: bool = False,
    ) -> mx.array:
        n_rows = q.shape[2]
        most = self.most_rows or MOST_ROWS.get(self.library.path_name, n_rows)
        if n_rows > most or q.dtype not in _QUERY_KINDS or not (is_supported(k.codec) and is_supported(v.codec)):
            return super().attend(q, k, v, offset=offset, query=query, reads=reads, own_from_blocks=own_from_blocks)
        step = _Step(q, k, v, query)
        n_encoded = min(k.end_page, v.end_page) * PAGE if own_from_blocks else 0
        pages = [(lo, hi, lo < n_encoded) for lo, hi in pairwise(cuts(offset, offset + n_rows))]
        parts = [step.attend(self.library, lo - offset, lo, hi - lo, own) for lo, hi, own in pages]
        if reads is not None:
            for lo, hi, own in pages:
                reads.count_page(lo, hi, k.codec, v.codec, query.window, step.n_prefix, own)
        out = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        answer = mx.array(out[None])
        return answer if answer.dtype == q.dtype else block_ops.as_float(answer, q.dtype)


class _Side:
    """One side's arrays in numpy, and planes of them by absolute page."""

    def __init__(self, view: SideView) -> None:
        self.view = view
        self.kind = KINDS[view.codec.cache_type]
        self.row_kind = self.kind if view.codec.is_float else _F16
        rows = view.rows.view(mx.uint16) if view.rows.dtype == mx.bfloat16 else view.rows
        held = (rows if view.host is None else None, view.codes, view.scales, view.prefix)
        self.arrays = [a for a in held if a is not None]

    def load(self) -> None:
        """After the arrays have been evaluated."""
        planes = [_with_plain_last_axis(a) for a in self.arrays]
        self.rows = planes.pop(0) if self.view.host is None else self.view.host
        self.planes = planes[:2] if self.view.codes is not None else None
        self.prefix = planes[-1] if self.view.prefix is not None else self.rows

    def pages(self, first: int) -> Plane:
        """Pages from `first` on, as steps beyond their own page read them."""
        if self.view.codec.is_float:
            return row_plane(self.kind, self.rows, first * PAGE - self.view.rows_start, PAGE)
        if self.planes is None:
            return Plane(kind=self.kind)
        skip = first - self.view.first_page
        return page_plane(self.kind, *(plane[skip:] for plane in self.planes))

    def exact_prefix(self) -> Plane:
        """The first rows: f16 beside blocks, a float side's own."""
        return row_plane(self.row_kind, self.prefix)

    def own(self, page: int) -> Plane:
        """Rows from the start of a page on."""
        return row_plane(self.row_kind, self.rows, page * PAGE - self.view.rows_start)


class _Step:
    """A step's arrays as the library takes them; keeps alive what the structure points to."""

    def __init__(self, q: mx.array, k: SideView, v: SideView, query: Query) -> None:
        queries = q.view(mx.uint16) if q.dtype == mx.bfloat16 else q  # no lazy operation where none is needed
        self.sides = _Side(k), _Side(v)
        sinks = None if query.sinks is None else query.sinks.astype(mx.float32)
        extra = [a for a in (sinks, k.channel_scale, k.page_means) if a is not None]
        mx.eval(queries, *self.sides[0].arrays, *self.sides[1].arrays, *extra)
        for side in self.sides:
            side.load()
        self.query = _with_plain_last_axis(queries)[0]
        self.sinks, self.channel_scale, self.means = (
            None if a is None else np.ascontiguousarray(np.asarray(a)) for a in (sinks, k.channel_scale, k.page_means)
        )
        self.n_heads, self.n_rows, _ = q.shape[1:]
        self.n_prefix = prefix_length(k, v)
        self.start = max(k.first_page, v.first_page)
        n_kv_heads = k.rows.shape[0]
        self.struct = AttentionStep(
            k_codec=ctypes.pointer(codec_struct(k.codec)),
            v_codec=ctypes.pointer(codec_struct(v.codec)),
            query_kind=_QUERY_KINDS[q.dtype],
            query_head=self.query.strides[0],
            query_row=self.query.strides[1],
            sinks=None if self.sinks is None else address(self.sinks),
            channel_scale=None if self.channel_scale is None else address(self.channel_scale),
            n_kv_heads=n_kv_heads,
            group=self.n_heads // n_kv_heads,
            first_page=self.start,
            n_prefix=self.n_prefix,
            window=query.window or 0,
            scale=query.scale,
        )
        self.struct.k_pages, self.struct.v_pages = (side.pages(self.start) for side in self.sides)
        if self.means is not None:
            skip = self.start - k.first_page
            self.struct.page_means = address(self.means) + skip * self.means.strides[0]
            self.struct.mean_page, self.struct.mean_head = self.means.strides[:2]
        if self.n_prefix:
            self.struct.k_prefix, self.struct.v_prefix = (side.exact_prefix() for side in self.sides)

    def attend(
        self, library: Library, first: int, offset: int, n_rows: int, own_from_blocks: bool
    ) -> NDArray[np.float32]:
        """The rows from `first` on, at positions from `offset` on in one page: float32 [n_heads, n_rows, head_dim]."""
        struct = self.struct
        out = np.empty((self.n_heads, n_rows, self.sides[1].view.codec.head_dim), np.float32)
        struct.query = address(self.query) + first * self.query.strides[1]
        struct.out, struct.n_rows, struct.offset, struct.own_coded = address(out), n_rows, offset, own_from_blocks
        struct.k_own, struct.v_own = (side.own(offset // PAGE) for side in self.sides)
        library.attend(struct)
        return out


def _with_plain_last_axis(array: mx.array) -> NDArray[Any]:
    """numpy's view of an evaluated array, copied only where its last axis is strided."""
    values = np.asarray(array)
    return values if values.strides[-1] == values.itemsize else np.ascontiguousarray(values)
